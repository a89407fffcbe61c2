"""Convert data, models and rules to the plain values of a specification, and back.

Data are a named dataset, a custom dataset, a table, or splits that were given in memory:

    {"name": "adult", "options": {...}, "directory": ...}
    {"dataset": "faces", "path": "my_data.py", "sha256": ..., "options": {...}, "content": ...}
    {"table": true, "path": ..., "sha256": ..., "options": {...}, "test": {"path", "sha256"}}
    {"tensors": true, "path": ..., "sha256": ...}

A model is a named network, or a custom function `make(x, classes) -> nn.Module`:

    {"name": "mlp", "options": {"hidden": [256, 256]}}
    {"function": "make", "path": "net.py", "sha256": ...}

A rule is a named rule or a custom class:

    {"name": "dpsgd", "options": {"C0": 1.0, "sigma": 1.0}}
    {"name": "mine", "class": "MyRule", "path": "my_rules.py", "sha256": ..., "options": {...}}
"""

from evenclip.sweep.describe.data import (
    NO_DATASET,
    Loaded,
    describe_dataset,
    file_sizes,
    find_source,
    load_data,
    save_splits,
)
from evenclip.sweep.describe.files import describe_file, sha256
from evenclip.sweep.describe.model import default_model, describe_model, make_model, model_name
from evenclip.sweep.describe.rule import describe_rule, make_rule, named_rule

__all__ = [
    "NO_DATASET",
    "Loaded",
    "default_model",
    "describe_dataset",
    "describe_file",
    "describe_model",
    "describe_rule",
    "file_sizes",
    "find_source",
    "load_data",
    "make_model",
    "make_rule",
    "model_name",
    "named_rule",
    "save_splits",
    "sha256",
]
