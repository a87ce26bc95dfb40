"""Fixtures that several test files share; builders with arguments are in `tests/toys.py`."""

from __future__ import annotations

import pytest
from hypothesis import settings
from transformers import PreTrainedTokenizerFast

from tests.toys import toy_tokenizer

# How long an example takes says more about the machine than about the code.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The toy tokenizer with everything set."""
    return toy_tokenizer()
