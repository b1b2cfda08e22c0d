"""What hooks cost beside the loss of the same tokens."""

import pytest
from hosts.slime.single import alone

from megatron_rc import RolloutCorrection
from speed import hook_cost

TOKENS, VOCABULARY = 256, 32_768


@pytest.mark.parametrize("correction", hook_cost.CORRECTIONS)
@pytest.mark.parametrize("host", hook_cost.HOOKS)
def test_a_hook_writes_at_most_one_percent_of_the_elements_of_the_loss(
    host: str, correction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(monkeypatch)
    made = hook_cost.Rollout.of(TOKENS)
    hook = hook_cost.HOOKS[host](made, RolloutCorrection.preset(correction))
    loss = hook_cost.counted(lambda: hook_cost.own_loss(made, VOCABULARY))
    assert loss.elements > 3 * TOKENS * VOCABULARY
    found = hook_cost.counted(hook)
    assert 0 < found.elements <= loss.elements / 100 and found.operations.total() < 600
