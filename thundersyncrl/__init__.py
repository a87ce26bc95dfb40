"""ThunderSyncRL: reinforcement learning for language-model agents, streamed, with zero staleness."""

__version__ = "0.1.0"
