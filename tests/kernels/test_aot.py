"""Every kernel compiles for every GPU it is meant for at the shapes of the launch table, and spills no register."""

import json
from dataclasses import replace

import aot
import pytest
import resources
from kernel_calls import ON_A_CARD, every_call
from tested_kernels import kernel_names

from megatron_rc.kernels.launch_table import LAUNCH

# one target of each vendor compiles in every run; the other generations of the first one take as long again
EVERY_RUN = ("sm_90", "gfx942")


@pytest.mark.parametrize(
    "target", [name if name in EVERY_RUN else pytest.param(name, marks=pytest.mark.full) for name in aot.TARGETS]
)
@pytest.mark.parametrize("kernel", kernel_names())
def test_it_compiles_without_spilling_a_register(kernel: str, target: str, pytestconfig: pytest.Config) -> None:
    # in every run, the many variants of the correction are of aligned memory alone, and AMD has one variant a kernel
    thinned = "natural" if kernel == "correction_fwd_kernel" else "all"
    thinned = thinned if target == aot.ONE_TARGET else "one"
    found = aot.resources(kernel, target, "all" if pytestconfig.getoption("full") else thinned)
    assert found, f"tests/support/kernel_calls.py launches {kernel} nowhere"
    # Triton 3.6 keeps two words of row_gradient, with a temperature per row, in memory
    allowed = 8 if resources.other_compiler() else 0
    assert [f"{one.spilled} bytes: {source}" for source, one in found if one.spilled > allowed] == []
    assert [str(source) for source, one in found if one.shared > aot.SHARED_LIMIT[target]] == []
    assert all(one.registers > 0 for _, one in found)


# listing the machine code of every variant takes as long as compiling it
LISTED_IN_EVERY_RUN = ("normalize_fwd_kernel", "policy_loss_fwd_kernel")


@resources.of_this_compiler
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kernel", [n if n in LISTED_IN_EVERY_RUN else pytest.param(n, marks=pytest.mark.full) for n in kernel_names()]
)
def test_the_committed_registers_spills_and_barriers_are_what_the_compiler_says_today(kernel: str) -> None:
    committed = json.loads(resources.FILE.read_text())["kernels"]
    assert resources.used_by(kernel) == committed[kernel], "run python tests/support/resources.py"


def test_every_entry_of_the_launch_table_is_compiled() -> None:
    capture = aot.capture()
    assert capture.off_table == []
    assert capture.entries == set(LAUNCH)


def test_the_committed_resources_are_of_todays_kernels_and_launch_shapes() -> None:
    found = json.loads(resources.FILE.read_text())
    assert found["launch"] == {name: list(launch) for name, launch in LAUNCH.items()}
    assert list(found["kernels"]) == kernel_names()
    assert all(used["most spilled"] == 0 for used in found["kernels"].values())


def test_what_the_tests_of_a_card_launch_is_among_it() -> None:
    compiled, launched = (
        {(one.name, aot.natural(one, aot.ONE_TARGET).key) for one in capture.launches}
        for capture in (aot.capture(), aot.captured(lambda: every_call(ON_A_CARD)))
    )
    assert {name for name, _ in launched - compiled} == set()


def test_every_launch_asks_for_fused_multiplication_and_addition() -> None:
    assert [one.name for one in aot.capture().launches if one.options.get("enable_fp_fusion") is not True] == []


def test_a_kernel_that_spills_is_found() -> None:
    launch = next(launch for launch in aot.capture().launches if launch.name == "row_gradient_bwd_kernel")
    source = next(aot.specialised(replace(launch, options=launch.options | {"maxnreg": 16}), "sm_90"))
    assert aot.compiled(source).spilled > 0


def test_arguments_are_specialised_as_on_a_gpu() -> None:
    launch = next(launch for launch in aot.capture().launches if launch.name == "row_gradient_bwd_kernel")
    aligned, unaligned, ones, wide = (source.source for source in aot.specialised(launch, aot.ONE_TARGET))
    assert aligned.signature == unaligned.signature
    by_address = {param.name for param in launch.kernel.params if not param.do_not_specialize_on_alignment}
    assert not any(aligned.signature[name].startswith("*") for name in by_address)
    width = (list(launch.arguments).index("width"),)
    assert ["tt.divisibility", 16] in aligned.attrs[width]
    assert unaligned.attrs == {}
    free = {param.name for param in launch.kernel.params if not param.do_not_specialize}
    assert not any(kind in ("i32", "i64") for name, kind in ones.signature.items() if name in free)
    assert "i64" in wide.signature.values()
    other = next(launch for launch in aot.capture().launches if launch.name == "policy_loss_reduce_kernel")
    source = aot.natural(other, aot.ONE_TARGET).source
    pointers = [(index,) for index, name in enumerate(other.arguments) if source.signature[name].startswith("*")]
    assert pointers and all(["tt.divisibility", 16] in source.attrs[index] for index in pointers)
