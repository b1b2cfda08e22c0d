"""AceMathAgent, in the name that the registry of megatron/rl expects here."""

import random
from typing import Any

from megatron.rl.agent.reward_only_agent import RewardOnlyAgent


class AceMathAgent(RewardOnlyAgent):
    """Prompts of four letters; rewards the share of vowels in the answer."""

    env_id: str = "letters"

    async def get_prompt(self, validation: bool) -> tuple[str, dict[str, str]]:
        word = "".join(random.choice("abcdefgh") for _ in range(4))
        return word, {"problem_id": word}

    async def get_reward(self, response: str, golden: Any, finish_reason: str) -> float:
        return sum(letter in "aeiou" for letter in response) / max(len(response), 1)
