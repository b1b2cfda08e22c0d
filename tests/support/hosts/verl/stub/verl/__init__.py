"""A stand-in of verl for tests: it loads plugins as verl does, and has the functions that a patch replaces."""

import importlib
import logging
import os

for _name in filter(None, os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
    importlib.import_module(_name)

if os.environ.get("VERL_STUB_PLUGIN"):
    try:
        importlib.import_module(os.environ["VERL_STUB_PLUGIN"])
    except Exception as _error:
        logging.getLogger(__name__).debug("plugin failed: %s", _error)
