"""How files are written and read: one writer for every file, and nothing damaged is believed.

kinds       every kind of file: who may read it, what vouches for it
write       a file, atomically; leftovers of dead processes
folder      a folder, atomically; exchange of an existing one
read        a file as a whole
seal        sealed JSON, manifests of folders
private     folders for private rows, removed in every ending
"""

from evenclip.files import kinds
from evenclip.files.folder import check_place, make_folder, set_aside, write_folder
from evenclip.files.kinds import KINDS, Kind
from evenclip.files.private import private_folder
from evenclip.files.read import LARGEST, read
from evenclip.files.seal import (
    MANIFEST,
    DamagedError,
    parsed,
    read_folder,
    read_sealed,
    sealed,
    unsealed,
)
from evenclip.files.write import (
    check_name,
    clear_leftovers,
    scratch_file,
    synchronise,
    write,
)

__all__ = [
    "KINDS",
    "LARGEST",
    "MANIFEST",
    "DamagedError",
    "Kind",
    "check_name",
    "check_place",
    "clear_leftovers",
    "kinds",
    "make_folder",
    "parsed",
    "private_folder",
    "read",
    "read_folder",
    "read_sealed",
    "scratch_file",
    "sealed",
    "set_aside",
    "synchronise",
    "unsealed",
    "write",
    "write_folder",
]
