"""The task copy: what is right, what a careless teacher writes, and how long it is."""

import re
from itertools import pairwise
from typing import Any

import pytest

from megatron_rc.tasks.copying import CopyOptions, CopyProblem, CopyTask


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
