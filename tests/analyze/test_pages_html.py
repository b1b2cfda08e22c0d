"""The page of a diagnosis: one file, offline, escaped, and without names under --share."""

import json
import re
from dataclasses import replace
from datetime import date
from html import unescape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_pages import Page, opened
from simulated_dumps import ONE_EACH, TRAPS, diagnosed, evidence_of, world, write_dump
from typer.testing import CliRunner

from megatron_rc.analyze import output, report_text, terminal
from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.commands import PAGE_LINE
from megatron_rc.analyze.pages import by_bin, html
from megatron_rc.analyze.pages.steps import short_names
from megatron_rc.analyze.statistics.residual import top_of
from megatron_rc.analyze.statistics.what_if import Missing
from megatron_rc.cli import app
from megatron_rc.correction.settings import PRESETS
from megatron_rc.drawing.heat_map import HeatMap, heat_map

CANARY = {"server": "canary_server", "reason": "canary_reason", "group": "canary_group", "token": 7654321}
CANARIES = (*map(str, CANARY.values()), "canary_folder")
"""A server, a finish reason, a prompt group, an id, and a part of the path."""
SCRIPT = "<script>alert(1)</script>"


def named(chunk: Chunk, server: str = "s", reason: str = "stop", group: str = "g", token: int = 7) -> Chunk:
    """A chunk of two steps and several servers with these names; every fourth id is ``token``."""
    size = chunk.num_sequences
    tokens = {**chunk.tokens, "token_id": np.where(chunk.index % 4 == 0, token, chunk.tokens["token_id"])}
    columns = {
        "step": np.arange(size) % 2,
        "server": np.array([f"{server}{i % 4}" for i in range(size)]),
        "finish_reason": np.array([f"{reason}{i % 2}" for i in range(size)]),
        "group": np.array([f"{group}{i // 4}" for i in range(size)]),
    }
    return replace(chunk, tokens=tokens, sequences={**chunk.sequences, **columns})


def small(trap: str = "honest") -> Chunk:
    return TRAPS[trap][1](world(3, sequences=48))


@pytest.mark.parametrize("name", ONE_EACH)
def test_the_page_of_every_rule_is_well_formed_small_and_loads_nothing(name: str) -> None:
    code, make = TRAPS[name]
    text = html.page(diagnosed(make(world(1, sequences=32)), source=name))
    page = Page(text)
    assert len(text.encode()) < 1_000_000
    loaded = [attributes.get(key) for _, attributes in page.tags for key in ("src", "href", "srcset", "data", "action")]
    assert all(value.startswith("data:image/png;base64,") for value in loaded if value)
    assert not {"link", "iframe", "object", "embed", "a", "form"} & {tag for tag, _ in page.tags}
    assert not re.search(r"@import|url\(|https?:", text.split("</head>")[0]) and len(page.named("script")) == 1
    assert code in page.texts


def test_the_panels_stand_in_the_order_in_which_they_are_read() -> None:
    page = Page(html.page(diagnosed(named(small()))))
    wanted = [
        "Honesty", "How large the gap is", "Log-probs of trainer and sampler", "By logged log-prob",
        "By position in the response", "Is the sum of log-ratios noise?", "k3 by server and step",
        "The largest weights", "How much of a batch is left under sequence weights", "Which bound C?",
        "k3 over steps", "Engine, policy or length?", "Who explains |l|?", "Tokens of the largest |l|",
        "What a correction would do", "Rules that said nothing, because they could not",
    ]  # fmt: skip
    assert [text.strip() for text in page.texts if text.strip() in wanted] == wanted


def test_panels_without_their_columns_are_left_out() -> None:
    text = html.page(diagnosed(small()))
    assert "k3 by server and step" not in text and "k3 over steps" not in text
    assert "Without the column entropy" not in text
    text = html.page(diagnosed(replace(small(), tokens={}, sequences={})))
    sentence = "Without the column entropy, a hidden temperature or top-p cannot be excluded."
    assert sentence in text.partition("<article")[0]
    assert ">ids<" not in text and "needs" not in Page(text).named("svg")


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (0, 3, 0), (2,) * 40])
def test_tiny_dumps_have_a_page(lengths: tuple[int, ...]) -> None:
    size = sum(lengths)
    for gap in (0.0, 0.1):
        log_mu = -np.linspace(0.1, 1, size)
        Page(html.page(diagnosed(Chunk(log_mu + gap, log_mu, np.concatenate([[0], np.cumsum(lengths)])))))


def test_every_string_of_a_dump_is_escaped() -> None:
    chunk = named(small("one stale server"), server=SCRIPT, reason=SCRIPT, group=SCRIPT)
    worst = np.where(np.char.endswith(chunk.sequences["server"], "2"), SCRIPT, chunk.sequences["server"])
    chunk = replace(chunk, sequences={**chunk.sequences, "server": worst})
    diagnosis = diagnosed(chunk, source=f"/data/{SCRIPT}.parquet", ignored=[SCRIPT])
    diagnosis.corrupt.add(SCRIPT)
    text = html.page(diagnosis)
    assert SCRIPT not in text and "alert(1)" in text
    assert "RC303" in [verdict.code for verdict in diagnosis.verdicts]
    assert len(Page(text).named("script")) == 1


def test_the_same_dump_gives_the_same_bytes() -> None:
    one, other = (diagnosed(small("policy lag")) for _ in range(2))
    assert html.page(one) == html.page(other) and output.to_json(one) == output.to_json(other)


def test_only_the_script_of_the_page_may_run_and_nothing_may_be_loaded() -> None:
    (policy,) = [
        tag["content"]
        for tag in Page(html.page(diagnosed(small()))).named("meta")
        if tag.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; img-src data:")
    assert "script-src 'sha256-" in policy


def test_a_bug_shows_the_experiment_and_the_fix_of_every_codebase() -> None:
    diagnosis = diagnosed(TRAPS["renormalised top-p .95"][1](world(1, sequences=48)))
    texts = Page(html.page(diagnosis)).texts
    (verdict,) = diagnosis.verdicts
    assert f" {verdict.page.experiment}" in texts
    assert all(host in texts and fix in texts for host, fix in verdict.page.fixes.items())


def test_the_table_of_corrections_has_every_method_or_says_what_is_missing() -> None:
    diagnosis = diagnosed(small())
    shown = diagnosis.what_if
    assert not isinstance(shown, Missing)
    bad = replace(shown.rows[0], name="wasteful", warnings=["drops 30% of the correct answers"])
    vars(diagnosis)["what_if"] = replace(shown, rows=[*shown.rows, bad])
    page = Page(html.page(diagnosis, what_if=True))
    methods = {name for name, preset in PRESETS.items() if preset.correction.surrogate is None}
    methods = methods - {"off-policy-sequence-mask"} | {diagnosis.recommendation.method}
    assert methods | {"wasteful", bad.warnings[0]} <= set(page.texts)
    red = sum(bool(row.warnings) for row in shown.rows) + 1
    assert [cell.get("class") for cell in page.named("td")].count("words red") == red
    vars(diagnosis)["what_if"] = Missing("<b>torch</b> is missing")
    page = Page(html.page(diagnosis, what_if=True))
    assert "<b>torch</b> is missing" in page.texts and "wasteful" not in page.texts
    assert diagnosis.recommendation.headline in page.texts
    assert "needs torch: --what-if adds it" in html.page(diagnosis)


def test_a_dash_in_the_table_of_corrections_is_explained_once() -> None:
    bare = replace(small(), sequences={})
    diagnosis = diagnosed(bare)
    table = diagnosis.what_if
    assert not isinstance(table, Missing)
    reason = report_text.what_if_gaps(table, with_signs=True)
    assert "right needs the column reward" in reason and "lost need the column advantage" in reason
    assert "drift needs the column top_old_logprobs" in reason
    assert html.page(diagnosis, what_if=True).count(reason) == 1
    size = bare.num_sequences
    sequences = {"reward": np.arange(size) % 2, "advantage": np.arange(size) % 2 - 0.5}
    top = top_of(bare.log_mu[:, None], bare.log_pi[:, None])
    known = replace(bare, tokens={**bare.tokens, "top": top}, sequences=sequences)
    assert "column" not in report_text.what_if_gaps(diagnosed(known).what_if, with_signs=True)


def hovered(text: str, title: str) -> dict[str, Any]:
    """What a pointer reads in the chart of a page with this title: values by series and place."""
    chart = next(svg for svg in Page(text).named("svg") if svg.get("aria-label") == title)
    series = json.loads(chart["data-hover"])["series"]
    return {each["label"]: dict(zip(each["steps"], each["values"], strict=True)) for each in series}


def test_the_gap_of_a_step_is_split_into_what_grew() -> None:
    chunk = named(small())
    noisy = (chunk.sequences["step"] == 1)[chunk.sequence_of]
    chunk = replace(chunk, log_mu=np.where(noisy, chunk.log_pi - 3 * chunk.log_ratio, chunk.log_mu))
    text = html.page(diagnosed(chunk))
    factors = hovered(text, "what multiplied the gap")
    assert factors["engine"][0] == factors["tail"][0] == 1
    assert factors["engine"][1] == pytest.approx(9, rel=0.3) and factors["length"][1] == pytest.approx(1, rel=0.1)
    whole = hovered(text, "k3 over steps")["k3"]
    product = factors["engine"][1] * factors["entropy"][1] * factors["tail"][1]
    assert product == pytest.approx(whole[1] / whole[0], rel=1e-3)


def test_k3_by_version_lag_is_that_of_the_tokens_of_each_lag() -> None:
    chunk = small("policy lag")
    lag = chunk.per_token("trainer_version") - chunk.tokens["version"]
    shown = hovered(html.page(diagnosed(chunk)), "k3 by version lag")["k3"]
    assert shown == {value: pytest.approx(chunk.k3[lag == value].mean(), rel=1e-4) for value in np.unique(lag)}
    assert "By version lag" not in html.page(diagnosed(small()))


def test_the_error_of_each_bound_is_that_of_the_recommendation() -> None:
    diagnosis = diagnosed(small())
    shown = hovered(html.page(diagnosis), "error of a truncated weight")
    for level, name in (("token", "tokens"), ("sequence", "responses")):
        assert list(shown[name].values()) == pytest.approx(diagnosis.recommendation.bounds[level].error, rel=1e-4)


def test_the_map_of_servers_and_steps_has_the_mean_k3_of_each() -> None:
    chunk = named(small())
    halves = (chunk.select_sequences(np.arange(48) // 24 == part) for part in (0, 1))
    cells = evidence_of(*halves).k3_by_server_and_step
    assert set(cells) == {("s0", 0), ("s1", 1), ("s2", 0), ("s3", 1)}
    for (server, step), k3 in cells.items():
        here = (chunk.sequences["server"] == server) & (chunk.sequences["step"] == step)
        assert k3 == pytest.approx(float(chunk.k3[here[chunk.sequence_of]].mean()))


def test_a_server_is_labelled_by_what_its_name_does_not_share() -> None:
    assert short_names([f"node-{i}.cluster.local:30000" for i in (1, 12)]) == ["1", "12"]
    assert short_names(["http://10.0.0.7:30000", "http://10.0.0.8:30001"]) == ["7:30000", "8:30001"]
    assert short_names(["a", "ab"]) == ["a", "ab"]
    assert short_names(["the only server"]) == ["…server"]


def test_a_log_ratio_of_one_sign_suggests_one_other_token() -> None:
    profile = diagnosed(TRAPS["logged temperature .7"][1](world(3, sequences=16))).evidence.profiles["log_mu"]
    assert by_bin._others(profile) > by_bin._others(replace(profile, log_ratio=profile.size)) == 1


def test_colours_do_not_blow_up_small_differences_between_servers() -> None:
    shown = HeatMap("t", "", "", [[-3.0, -2.99]], ["a"], ["0", "1"], "server", "step")
    assert {"-3", "-2.99"} <= set(Page(heat_map(shown)).texts)
    assert {"-3", "-2"} <= set(Page(heat_map(shown, least_span=1.0)).texts)


@pytest.mark.parametrize("trap", ["one stale server", "stale cache", "policy lag"])
def test_what_is_shared_has_no_ids_names_and_paths(trap: str) -> None:
    file = "/data/canary_folder/dump.parquet"
    diagnosis = diagnosed(named(small(trap), **CANARY), source=file, ignored=["canary_folder/notes.txt"])
    diagnosis.corrupt.add(f"{file}: row 3: canary_server")
    for text in (html.page(diagnosis, share=True), output.to_json(diagnosis, share=True)):
        assert not [canary for canary in CANARIES if canary in text]
    # the test could not fail if nothing named them without share
    page = html.page(diagnosis)
    assert all(canary in page for canary in ("canary_server", "canary_folder", "7654321"))


def test_a_prompt_and_a_notebook_show_the_report_and_the_page() -> None:
    diagnosis = diagnosed(small())
    assert str(diagnosis) == terminal.text(diagnosis) and "a dump (arrays): " in str(diagnosis)
    assert len(repr(diagnosis)) < 100 and "\x1b" not in str(diagnosis)
    shown = re.fullmatch(r'<iframe [^>]* srcdoc="([^"]*)"></iframe>', diagnosis._repr_html_())
    assert shown and unescape(shown[1]) == html.page(diagnosis)


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["analyze", *map(str, arguments)])


def test_the_command_writes_the_page_into_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = write_dump(named(small()), tmp_path / "dump.parquet")
    monkeypatch.chdir(tmp_path)
    done = run(dump)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == PAGE_LINE.format("analysis.html")
    first = (tmp_path / "analysis.html").read_text()
    assert ".../dump.parquet: rollout analysis" in first and str(tmp_path) not in first
    command = "<code>megatron-rc analyze .../dump.parquet</code>"
    assert f"<footer>megatron-rc {version('megatron-rc')}, {date.today()}: {command}</footer>" in first
    assert run(dump).exit_code == 0 and (tmp_path / "analysis.html").read_text() == first
    elsewhere = tmp_path / "other.html"
    done = run(dump, "--html", elsewhere, "--json")
    assert json.loads(done.stdout)["format"] and done.stderr.splitlines()[-1] == PAGE_LINE.format(elsewhere)
    (tmp_path / "analysis.html").unlink()
    assert run(dump, "--no-html").exit_code == 0 and not (tmp_path / "analysis.html").exists()


def test_the_command_leaves_a_file_of_someone_else_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dump = write_dump(small(), tmp_path / "dump.parquet")
    mine = tmp_path / "analysis.html"
    mine.write_text("<!DOCTYPE html><html>my thesis</html>")
    done = run(dump)
    assert isinstance(done.exception, ValueError) and "is not the page of an analysis" in str(done.exception)
    assert done.stdout == "" and "my thesis" in mine.read_text()
    for wrong, sentence in ((tmp_path, "is a folder"), (tmp_path / "no" / "x.html", "does not exist")):
        assert sentence in str(run(dump, "--html", wrong).exception)


def test_the_shared_command_names_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "canary_folder"
    folder.mkdir()
    dump = write_dump(named(small("one stale server"), **CANARY), folder / "dump.parquet")
    page = tmp_path / "page.html"
    done = run(dump, "--share", "--html", page)
    assert done.exit_code == 0, done.output
    printed = "\n".join(done.stdout.splitlines()[:-1])
    assert "RC303" in printed
    for text in (printed, page.read_text()):
        assert text and not [canary for canary in CANARIES if canary in text]


@pytest.mark.full
def test_a_browser_shows_the_page_without_a_request_or_an_error(tmp_path: Path) -> None:
    def shown(page: Path) -> tuple[str, str, list[str]]:
        """The document, the console, and the addresses that the page asked for."""
        log = page.with_suffix(".net.json")
        done = opened(page, "--enable-logging=stderr", f"--log-net-log={log}")
        console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
        events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
        asked = [p["url"] for p in events if "url" in p and "file://" in p.get("network_isolation_key", "")]
        return done.stdout, console, asked

    control = tmp_path / "control.html"
    control.write_text('<img src="http://canary.invalid/x.png"><script>missing()</script>')
    _, console, asked = shown(control)
    assert "missing is not defined" in console and "http://canary.invalid/x.png" in asked
    chunk = named(small("one stale server"), server=SCRIPT)
    text, console, asked = shown(html.write(diagnosed(chunk), tmp_path / "page.html"))
    assert not console and not asked
    # the script of the page has run: it adds a box for the values to every chart
    assert text.count('class="tip"') >= 6
