"""The checks that cases name. Importing this package enters all of them into ``contract.case.CHECKS``."""

import importlib
import pkgutil

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
