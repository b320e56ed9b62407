"""Pooling parameters are checked where they are made."""

import pytest

from quire.messages.pooling_params import PoolingParams


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "rank"}, "task is 'rank'; it must be None or one of: embed, classify, token_embed, token_classify"),
        ({"task": "score"}, "task 'score' is now classify"),
        ({"step_tag_id": -1}, "step_tag_id is -1"),
        ({"pooling_type": 3}, "pooling_type is 3; it must be None or the name of a pooling method"),
        ({"dimensions": 0}, "dimensions is 0; it must be a whole number between 1 and"),
        ({"dimensions": True}, "dimensions is True"),
        ({"use_activation": "yes"}, "use_activation is 'yes'; it must be true or false"),
        ({"skip_reading_prefix_cache": 1}, "skip_reading_prefix_cache is 1"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0; it must be 1 or more, or -1"),
        ({"normalize": True, "use_activation": False}, "normalize is a former name of use_activation; give only one"),
    ],
)
def test_wrong_values_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        PoolingParams(**fields)


def test_a_former_name_counts():
    assert PoolingParams(normalize=False) == PoolingParams(use_activation=False)
