"""The machine code for an H200: few instructions for every logit, wide loads, and few barriers."""

import json
from dataclasses import replace

import aot
import kernel_calls
import pytest
import resources
import sass

FORWARD, BACKWARD = "row_statistics_fwd_kernel", "row_gradient_bwd_kernel"


@resources.of_this_compiler
@pytest.mark.parametrize("columns", resources.LOOPS)
@pytest.mark.parametrize("entropy", [False, True])
def test_a_logit_takes_few_instructions_and_loads_are_wide(columns: int, entropy: bool) -> None:
    rows = sass.loops_of_rows(columns, entropy)
    committed = json.loads(resources.FILE.read_text())["loops"]
    assert [list(row) for row in rows] == [row for row in committed if row[1:3] == [columns, entropy]], (
        "run python tests/support/resources.py"
    )
    found = {row.kernel: row for row in rows}
    assert found[FORWARD].instructions <= (10.5 if entropy else 8)
    assert found[BACKWARD].instructions <= (15.1 if columns % 8 else 12.5 if entropy else 10.5)
    assert {row.loads for row in rows} == {"LDG.E.U16" if columns % 8 else "LDG.E.128"}


def test_the_id_of_the_target_is_loaded_before_the_loop_and_its_logit_before_the_lanes_are_joined() -> None:
    launch = next(one for one in aot.captured(lambda: sass._rows(18_992, True)).launches if one.name == FORWARD)
    code = sass.instructions(aot.natural(launch, aot.ONE_TARGET))
    loop = sass.loops(code)[0]
    (target_id,) = (one.address for one in code if one.opcode == "LDG.E.64")
    (target,) = (one.address for one in code if one.opcode == "LDG.E.U16")
    first_barrier = next(one.address for one in code if one.opcode.startswith("BAR"))
    assert target_id < loop[0].address and loop[-1].address < target < first_barrier


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
    made = aot.captured(lambda: kernel_calls.CALLS[call](kernel_calls.WIDE, 0).run("triton")).launches
    source = aot.natural(next(one for one in made if one.name == kernel), aot.ONE_TARGET)
    assert sass.number_of(sass.instructions(source), "BAR") == barriers


def test_no_variant_of_the_correction_has_more_than_six_barriers() -> None:
    kernel = "correction_fwd_kernel"
    committed = json.loads(resources.FILE.read_text())["kernels"][kernel]
    assert committed["most barriers"] <= 6 and committed["most spilled"] == 0
    # that of prefixes, which has two scans, is the variant with most of them
    made = aot.captured(lambda: kernel_calls.CALLS["correct prefixes"](kernel_calls.WIDE, 0).run("triton")).launches
    source = aot.natural(next(one for one in made if one.name == kernel), aot.ONE_TARGET)
    assert sass.number_of(sass.instructions(source), "BAR") == committed["most barriers"]
    used = aot.compiled(source)
    assert used.spilled == 0 and committed["fewest registers"] <= used.registers <= committed["most registers"]


def test_stages_change_no_instruction() -> None:
    for launch in aot.captured(lambda: sass._rows(18_992, False)).launches:
        codes = []
        for stages in (1, 4):
            staged = replace(launch, options=launch.options | {"num_stages": stages})
            codes.append(sass.instructions(aot.natural(staged, aot.ONE_TARGET)))
        assert codes[0] == codes[1]
