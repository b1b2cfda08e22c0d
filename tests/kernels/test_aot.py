"""Every kernel compiles for every GPU at the shapes of the launch table, without spills; machine code for an H200."""

import json
from dataclasses import replace

import aot
import kernel_calls
import pytest
import resources
from kernel_calls import ON_A_CARD, every_call
from tested_kernels import kernel_names

from megatron_rc.kernels.launch_table import LAUNCH

# one target of each vendor compiles in every run; the other generations of the first one take as long again
EVERY_RUN = ("sm_90", "gfx942")
# listing the machine code of every variant takes as long as compiling it
LISTED_IN_EVERY_RUN = ("normalize_fwd_kernel", "policy_loss_fwd_kernel")
FORWARD, BACKWARD = "row_statistics_fwd_kernel", "row_gradient_bwd_kernel"


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
    assert ["tt.divisibility", 16] in aligned.attrs[(list(launch.arguments).index("width"),)]
    assert unaligned.attrs == {}
    free = {param.name for param in launch.kernel.params if not param.do_not_specialize}
    assert not any(kind in ("i32", "i64") for name, kind in ones.signature.items() if name in free)
    assert "i64" in wide.signature.values()
    other = next(launch for launch in aot.capture().launches if launch.name == "policy_loss_reduce_kernel")
    source = aot.natural(other, aot.ONE_TARGET).source
    pointers = [(index,) for index, name in enumerate(other.arguments) if source.signature[name].startswith("*")]
    assert pointers and all(["tt.divisibility", 16] in source.attrs[index] for index in pointers)


@resources.of_this_compiler
@pytest.mark.parametrize("columns", resources.LOOPS)
@pytest.mark.parametrize("entropy", [False, True])
def test_a_logit_takes_few_instructions_and_loads_are_wide(columns: int, entropy: bool) -> None:
    rows = aot.loops_of_rows(columns, entropy)
    theirs = [row for row in json.loads(resources.FILE.read_text())["loops"] if row[1:3] == [columns, entropy]]
    assert [list(row) for row in rows] == theirs, "run python tests/support/resources.py"
    found = {row.kernel: row for row in rows}
    assert found[FORWARD].instructions <= (10.5 if entropy else 8)
    assert found[BACKWARD].instructions <= (15.1 if columns % 8 else 12.5 if entropy else 10.5)
    assert {row.loads for row in rows} == {"LDG.E.U16" if columns % 8 else "LDG.E.128"}


def test_the_id_of_the_target_is_loaded_before_the_loop_and_its_logit_before_the_lanes_are_joined() -> None:
    launch = next(one for one in aot.captured(lambda: aot._rows(18_992, True)).launches if one.name == FORWARD)
    code = aot.instructions(aot.natural(launch, aot.ONE_TARGET))
    loop = aot.loops(code)[0]
    (target_id,) = (one.address for one in code if one.opcode == "LDG.E.64")
    (target,) = (one.address for one in code if one.opcode == "LDG.E.U16")
    first_barrier = next(one.address for one in code if one.opcode.startswith("BAR"))
    assert target_id < loop[0].address and loop[-1].address < target < first_barrier


def asked_for(call: str, kernel: str) -> aot.Source:
    made = aot.captured(lambda: kernel_calls.CALLS[call](kernel_calls.WIDE, 0).run("triton")).launches
    return aot.natural(next(one for one in made if one.name == kernel), aot.ONE_TARGET)


@pytest.mark.parametrize(
    ("call", "kernel", "barriers"),
    [
        ("correct token", "correction_fwd_kernel", 1),
        ("correct by lag", "correction_fwd_kernel", 3),
        ("correct prefixes", "correction_fwd_kernel", 5),
        ("loss reinforce", "policy_loss_fwd_kernel", 1),
    ],
)
def test_warps_meet_once_for_all_sums_and_else_where_they_scan(call: str, kernel: str, barriers: int) -> None:
    assert aot.number_of(aot.instructions(asked_for(call, kernel)), "BAR") == barriers


def test_no_variant_of_the_correction_has_more_than_six_barriers() -> None:
    kernel = "correction_fwd_kernel"
    committed = json.loads(resources.FILE.read_text())["kernels"][kernel]
    assert committed["most barriers"] <= 6 and committed["most spilled"] == 0
    # that of prefixes, which has two scans, is the variant with most of them
    source = asked_for("correct prefixes", kernel)
    assert aot.number_of(aot.instructions(source), "BAR") == committed["most barriers"]
    used = aot.compiled(source)
    assert used.spilled == 0 and committed["fewest registers"] <= used.registers <= committed["most registers"]


def test_stages_change_no_instruction() -> None:
    for launch in aot.captured(lambda: aot._rows(18_992, False)).launches:
        codes = []
        for stages in (1, 4):
            staged = replace(launch, options=launch.options | {"num_stages": stages})
            codes.append(aot.instructions(aot.natural(staged, aot.ONE_TARGET)))
        assert codes[0] == codes[1]
