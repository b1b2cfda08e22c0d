"""Score centering with the kernels: the promises of every backend, but for rounding, which the interpreter cuts off."""

import pytest
from test_centered import test_a_row_that_does_not_count_has_no_term_and_no_gradient  # noqa: F401
from test_centering import test_single_precision_agrees_with_the_truth  # noqa: F401

pytestmark = pytest.mark.kernel
