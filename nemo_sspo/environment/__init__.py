"""Rewards: the format of a response and its answer."""

from nemo_sspo.environment.answers import answer_reward, parse_gold
from nemo_sspo.environment.formats import format_reward, uses_think_block
from nemo_sspo.environment.scoring import Reward, score

__all__ = ["Reward", "answer_reward", "format_reward", "parse_gold", "score", "uses_think_block"]
