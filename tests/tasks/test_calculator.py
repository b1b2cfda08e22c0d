"""The tasks copy and calculator: the tool, what a teacher writes, and what a response earns."""

import random
import re
from itertools import pairwise
from typing import Any

import pytest

from megatron_rc.tasks.calculator import CalculatorOptions, CalculatorTask, careless_terms, result
from megatron_rc.tasks.copying import CopyOptions, CopyProblem, CopyTask


def calculator(**options: Any) -> CalculatorTask:
    return CalculatorTask(CalculatorOptions(**options))


@pytest.mark.parametrize(
    ("call", "written"),
    [("b47+38=", "85"), ("47+38=", "85"), ("c5-38=", "-33"), ("d-33+40=", "7"), ("z0-0=", "0"),
     ("b47=", "?"), ("b47+=", "?"), ("+3=", "?"), ("=", "?"), ("b4b+3=", "?"), ("b1+2+3=", "?"), ("b--1+2=", "?"),
     ("1" * 13 + "+1=", "?")],
)  # fmt: skip
def test_the_calculator_answers_every_call(call: str, written: str) -> None:
    assert result(call) == written


def test_the_environment_replies_to_calls_alone_and_to_the_last_turn_alone() -> None:
    task = calculator()
    (prompt,) = task.prompts(0, 1)
    encode, decode = task.alphabet.encode, task.decode
    assert decode(task.reply(prompt, encode("b47+38="))) == "85;"
    assert decode(task.reply(prompt, encode("b47+38=85;c85-5="))) == "80;"
    assert decode(task.reply(prompt, encode("b47+38=85;85="))) == "?;"
    assert list(task.reply(prompt, encode("b47+38=85;85."))) == []
    assert set(task.stop_token_ids) == set(encode("=."))


@pytest.mark.parametrize("options", [{}, {"fewest_terms": 2, "most_terms": 26, "max_turns": 26, "digits": 6}])
def test_demonstrations_are_what_the_environment_would_have_written(options: dict[str, Any]) -> None:
    task = calculator(max_turn_tokens=16, **options)
    lengths = set()
    for shown in task.demonstrations(0, 200):
        mask = shown.output_mask or [True] * len(shown.output_ids)
        by_teacher = [token for token, taught in zip(shown.output_ids, mask, strict=True) if taught]
        (prompt,) = task.prompts(0, 1)
        written: list[int] = []
        while by_teacher:
            ends = [i for i, token in enumerate(by_teacher) if token in task.stop_token_ids]
            turn, by_teacher = by_teacher[: ends[0] + 1], by_teacher[ends[0] + 1 :]
            assert len(turn) <= 2 * task.options.digits + 3
            written += turn
            written += task.reply(prompt, written)
        assert written == shown.output_ids
        lengths.add(len(written))
    assert min(lengths) < 40
    assert max(lengths) <= 53 if not options else max(lengths) > 300


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_the_error_rate_is_the_share_of_demonstrations_that_earn_nothing(rate: float) -> None:
    task = calculator(demonstration_error_rate=rate)
    shown = task.demonstrations(0, 1000)
    texts = [task.decode(one.prompt_ids) for one in shown]
    prompts = [task._prompt([int(term) for term in re.findall(r"[a-z]([+-]?\d+)", text)]) for text in texts]
    assert [prompt.text for prompt in prompts] == texts
    right = sum(task.rewards(prompts, [one.output_ids for one in shown])) / 1000
    assert abs(right - (1 - rate)) <= 4 * (rate * (1 - rate) / 1000) ** 0.5


def test_a_careless_teacher_leaves_out_the_last_term_or_miscopies_one_digit_by_one() -> None:
    kinds = {tuple(careless_terms([47, 38, -5], random.Random(seed), 99)) for seed in range(300)}
    assert kinds == {(47, 38), *{(47, 28, -5), (47, 48, -5), (47, 37, -5), (47, 39, -5), (47, 38, -4), (47, 38, -6)}}
    # no digit may be off without a total below 0 or above 9
    assert {tuple(careless_terms([0, 9, -9], random.Random(seed), 9)) for seed in range(50)} <= {(0, 9), (0, 9, -8)}


@pytest.mark.parametrize(
    ("response", "reward"),
    [("80.", 1.0), ("b47+38=85;c85-5=80;80.", 1.0), ("b47+38=85;80.", 1.0), ("b47+38=85;c85-5=80;", 0.0), ("80", 0.0),
     ("b47+38=85;c85-5=80;81.", 0.0), ("b47+38=85;c85-5=80;080.", 0.0), ("80.80.", 0.0), ("", 0.0)],
)  # fmt: skip
def test_the_last_turn_counts_whatever_the_calls_were(response: str, reward: float) -> None:
    task = calculator()
    prompt = task._prompt([47, 38, -5])
    assert (prompt.text, prompt.answer) == ("a47b+38c-5:", "80")
    assert task.rewards([prompt], [task.alphabet.encode(response)]) == [reward]


def copy(**options: Any) -> CopyTask:
    return CopyTask(CopyOptions(**options))


def test_the_right_response_counts_down_to_zero_and_repeats_the_letters() -> None:
    task = copy(fewest_lines=11, most_lines=11, letters=3)
    (prompt,) = task.prompts(0, 1)
    number, letters = prompt.text[:2], prompt.text[2:]
    assert (number, len(letters)) == ("11", 3)
    assert prompt.answer == "".join(f"{line:02d}{letters}" for line in range(10, -1, -1)) + "."
    assert task.rewards([prompt], [task.alphabet.encode(prompt.answer)]) == [1.0]


def test_a_default_response_has_more_than_512_tokens_and_lengths_vary_on_request() -> None:
    assert {len(d.output_ids) for d in copy().demonstrations(0, 20)} == {513}
    lengths = {len(d.output_ids) for d in copy(fewest_lines=60, most_lines=70).demonstrations(0, 300)}
    assert lengths == {8 * lines + 1 for lines in range(60, 71)}


def test_the_reward_is_the_share_of_right_tokens_line_by_line() -> None:
    task = copy(fewest_lines=2, most_lines=2, letters=3)
    prompt = task._prompt(CopyProblem("aba", 2))
    assert (prompt.text, prompt.answer) == ("02aba", "01aba00aba.")
    scores = {"01aba00aba.": 1.0, "01aba00abb.": 10 / 11, "01abb00abb.": 9 / 11, "01aba.": 6 / 11, "": 0.0}
    # a line that is left out costs itself, the stop token counts at the end alone, and more than the answer costs, too
    scores |= {"00aba.": 6 / 11, "01aba00aba": 10 / 11, "01aba00aba.a": 10 / 12, "01aba01bab00aba.": 11 / 16}
    scores |= {"01ab00aba.": 10 / 11, "01baa00aba.": 9 / 11, "1aba00aba.": 6 / 11, "aba": 0.0, "0101010101.": 3 / 11}
    responses = [task.alphabet.encode(text) for text in scores]
    assert task.rewards([prompt] * len(scores), responses) == pytest.approx(list(scores.values()))


def test_an_error_of_the_teacher_stays_in_all_lines_below() -> None:
    task = copy(demonstration_error_rate=0.3)
    changes = lines = 0
    for shown in task.demonstrations(0, 100):
        written = re.findall(r"\d\d([a-t]{6})", task.decode([*shown.prompt_ids, *shown.output_ids]))
        differing = [sum(a != b for a, b in zip(*pair, strict=True)) for pair in pairwise(written)]
        assert set(differing) <= {0, 1} and shown.output_mask is None
        changes, lines = changes + sum(differing), lines + len(differing)
    assert lines == 6400 and abs(changes / lines - 0.3) < 4 * (0.3 * 0.7 / lines) ** 0.5


def test_demonstrations_earn_a_little_more_than_half() -> None:
    task = copy()
    shown = task.demonstrations(0, 200)
    letters = [task.decode(one.prompt_ids)[2:] for one in shown]
    rewards = task.rewards([task._prompt(CopyProblem(one, 64)) for one in letters], [one.output_ids for one in shown])
    assert 0.5 < sum(rewards) / 200 < 0.62


def test_a_careful_teacher_is_right() -> None:
    task = copy(demonstration_error_rate=0.0)
    for shown in task.demonstrations(0, 5):
        text = task.decode(shown.prompt_ids)
        assert task.decode(shown.output_ids) == "".join(f"{n:02d}{text[2:]}" for n in range(63, -1, -1)) + "."
