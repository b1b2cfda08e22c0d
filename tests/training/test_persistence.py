"""Persistence is the cosine of what sampler and trainer differ by at each token id, from one rollout to the next."""

import math

import pytest
import torch
from torch import Tensor

from megatron_rc.training.persistence import SIZE, add_persistence, sketch

VOCABULARY = 5_000


def rollout(direction: Tensor, seed: int, tokens: int = 40_000) -> tuple[Tensor, ...]:
    """Tokens drawn from mu, and their log-probs by mu and by pi = softmax(logits of mu + direction), [N]."""
    generator = torch.Generator().manual_seed(seed)
    log_mu = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0)).double().log_softmax(0)
    ids = torch.multinomial(log_mu.exp(), tokens, replacement=True, generator=generator)
    return (log_mu + direction).log_softmax(0)[ids].float(), log_mu[ids].float(), ids, torch.ones(tokens).bool()


def direction(seed: int) -> Tensor:
    return 0.3 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)).double()


def by_id(train: Tensor, mu: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(VOCABULARY).double().index_add_(0, ids[mask], ((train - mu).double().exp() - 1)[mask])


@pytest.mark.parametrize(("second", "expected"), [(7, 1), (8, 0)])
def test_it_is_the_cosine_over_all_ids_to_the_error_of_a_sketch(second: int, expected: float) -> None:
    rollouts = rollout(direction(7), 1), rollout(direction(second), 2)
    exact = torch.cosine_similarity(*map(lambda each: by_id(*each), rollouts), dim=0).item()
    metrics = {}
    before: tuple[float, ...] = ()
    for each in rollouts:
        metrics = {"k3": 1.0, **sketch(*each).values()}
        before = add_persistence(metrics, before)
    assert metrics.keys() == {"k3", "persistence"} and len(before) == SIZE
    assert metrics["persistence"] == pytest.approx(exact, abs=3 / math.sqrt(SIZE))
    assert exact == pytest.approx(expected, abs=0.1)


def test_sketches_of_two_halves_add_up_and_masked_or_corrupt_tokens_count_nowhere() -> None:
    train, mu, ids, mask = rollout(direction(7), 1, tokens=1000)
    mask[::3], train[1::50] = False, math.nan
    whole, halves = sketch(train, mu, ids, mask), sketch(*(each[:400] for each in (train, mu, ids, mask)))
    halves.merge(sketch(*(each[400:] for each in (train, mu, ids, mask))))
    kept = mask & train.isfinite()
    only = sketch(train[kept], mu[kept], ids[kept], mask[kept]).values()
    assert halves.values() == pytest.approx(whole.values()) and only == pytest.approx(whole.values())


def test_the_first_rollout_and_one_without_an_update_have_none() -> None:
    first = {**sketch(*rollout(direction(1), 1, tokens=10)).values()}
    before = add_persistence(first, ())
    assert first == {} and add_persistence({"updates": 0.0}, before) == before
