"""Fixtures that several test files share; builders with arguments are in `tests/toys.py`."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from tests.toys import toy_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The toy tokenizer with everything set."""
    return toy_tokenizer()
