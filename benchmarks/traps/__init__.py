"""Real dumps with one planted fault each."""

import sys

# transformers looks for a package of this name, and would import the script kernels.py beside this folder
sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
