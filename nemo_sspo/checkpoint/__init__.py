"""Checkpoints: Megatron-Core's distributed format, in folders that are whole or not there at all."""

from nemo_sspo.compat import megatron_cpu as megatron_cpu  # isort: skip  (before Megatron-Core is imported)
from nemo_sspo.checkpoint.folder import Checkpoint, Position, best, find_whole, list_checkpoints, read_checkpoint
from nemo_sspo.checkpoint.saver import CheckpointSaver
from nemo_sspo.checkpoint.state import load_training_state, load_weights

__all__ = [
    "Checkpoint",
    "CheckpointSaver",
    "Position",
    "best",
    "find_whole",
    "list_checkpoints",
    "load_training_state",
    "load_weights",
    "read_checkpoint",
]
