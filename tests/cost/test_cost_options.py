"""What an option adds to the compiled step of SAM, over the hand-written step without it."""

import pytest
from cost_programs import handwritten, library, ratios

pytestmark = pytest.mark.slow


def test_skipping_costs_a_pass_over_the_gradient_and_the_updates():
    """The norm of the ascent gradient is known; the update is decided on before it is made."""
    added = ratios(library("sam", skip_nonfinite=True), handwritten("sam"))
    assert added["flops"] < 1.005
    assert added["bytes accessed"] < 1.15
    # Without the options nothing is added.
    assert ratios(library("sam"), handwritten("sam"))["bytes accessed"] < 1.02
