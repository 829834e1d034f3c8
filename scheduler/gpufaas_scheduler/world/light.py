"""
The base of structs in compiled modules.

In a compiled module, arguments of a struct such as ``gc=False`` have no effect, but a struct inherits those of its
base. So this module is not compiled (`scheduler/compile.py`).
"""

from msgspec import Struct


class Light(Struct, eq=False, gc=False):
    """A struct that equals itself only, and that the garbage collector does not look at."""
