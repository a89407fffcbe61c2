"""Data for training: the form they enter in, and one file for each dataset."""

from evenclip.data.adult import adult
from evenclip.data.dataset import Dataset, Inputs, MapDataset, Samples, Splits, as_dataset

__all__ = ["Dataset", "Inputs", "MapDataset", "Samples", "Splits", "adult", "as_dataset"]
