"""Reward of mathematical answers through the math-verify library."""

from __future__ import annotations


def math_answer(prompt: str, response: str, answer: str) -> float:
    """1.0 when the final answer written in ``response`` equals ``answer`` as mathematics, else 0.0.

    1/2, 0.5 and \\frac{1}{2} are equal; the response's last boxed or stated expression counts.

    Args:
        prompt: not used.
        response: text of the response.
        answer: the expected answer, plain or LaTeX, with or without dollar signs.

    Raises:
        ValueError: the library is missing, or ``answer`` is not an expression it can read.

    Source: https://github.com/huggingface/Math-Verify
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ValueError("math-verify is not installed: pip install 'megatron-rc[math]'") from error

    gold = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
    if not gold:
        raise ValueError(f"answer {answer!r} is not an expression that math-verify can read")
    return float(verify(gold, parse(response)))
