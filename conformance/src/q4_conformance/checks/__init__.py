"""The checks that cases name: each shows what its case's text says. Importing this package enters all in ``CHECKS``."""

import importlib
import pkgutil

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
