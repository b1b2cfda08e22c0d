"""A reward function for mathematical answers, with the math-verify library."""

from megatron_rc.versions import installing


def math_answer(prompt: str, response: str, answer: str) -> float:
    """1.0 if the final answer of ``response`` equals ``answer`` as mathematics, otherwise 0.0.

    1/2, 0.5 and \\frac{1}{2} are equal. The last expression that is boxed or stated in the response counts.

    Args:
        prompt: not used.
        response: text of the response.
        answer: the expected answer, plain or LaTeX, with or without dollar signs.

    Raises:
        ValueError: the library is missing, or cannot read ``answer``.

    Source: https://github.com/huggingface/Math-Verify
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ValueError(f"math-verify is not installed: {installing('math')}") from error

    gold = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
    if not gold:
        raise ValueError(f"answer {answer!r} is not an expression that math-verify can read")
    return float(verify(gold, parse(response)))
