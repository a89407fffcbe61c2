"""Datasets for training: the common form, one module per dataset, and a catalogue."""

from evenclip.data.adult import adult
from evenclip.data.catalogue import SOURCES, File, Source, data_directory
from evenclip.data.celeba import celeba
from evenclip.data.dataset import Dataset, Inputs, MapDataset, Samples, Splits, as_dataset
from evenclip.data.digits import digits
from evenclip.data.dutch import dutch
from evenclip.data.mnist import mnist
from evenclip.data.parquet import Parquet, parquet
from evenclip.data.streamed import Streamed
from evenclip.data.toy import toy

__all__ = [
    "SOURCES",
    "Dataset",
    "File",
    "Inputs",
    "MapDataset",
    "Parquet",
    "Samples",
    "Source",
    "Splits",
    "Streamed",
    "adult",
    "as_dataset",
    "celeba",
    "data_directory",
    "digits",
    "dutch",
    "mnist",
    "parquet",
    "toy",
]
