"""Score centering with the kernels: the promises of every backend."""

from test_centered import (  # noqa: F401
    test_a_row_that_does_not_count_has_no_term_and_no_gradient,
    test_each_gradient_is_rounded_once_also_in_place,
)
from test_centering import test_single_precision_agrees_with_the_truth  # noqa: F401
