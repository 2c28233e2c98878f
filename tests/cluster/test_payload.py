from __future__ import annotations

import json

from llamarl.cluster.api import error_reply
from llamarl.config.load import validated
from llamarl.config.sft import SftConfig


class Mine:
    def model_validate(self, data: object) -> None:
        raise RuntimeError("my fault")


def test_a_part_of_the_users_own_is_shown_without_what_called_it() -> None:
    try:
        validated({}, Mine())
    except RuntimeError as error:
        text = error_reply(error, "score", None).remote_traceback
    assert "my fault" in text and __file__ in text
    assert "/config/load.py" not in text


def test_a_failure_of_ours_is_shown_whole() -> None:
    try:
        validated(json, SftConfig)
    except Exception as error:
        text = error_reply(error, "score", None).remote_traceback
    assert "/config/load.py" in text
