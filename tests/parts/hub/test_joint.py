"""The core types what it opens, and sees no more of it."""

from __future__ import annotations

import inspect

from llamarl.config.hub import HubAccess, open_hub
from llamarl.parts.hub import joint


def test_the_joint_is_what_the_core_expects() -> None:
    assert open_hub() is joint
    promised = {name: one for name, one in vars(HubAccess).items() if inspect.isfunction(one) and name[0] != "_"}
    assert promised.keys() == set(joint.__all__)
    for name, one in promised.items():
        _, *expected = inspect.signature(one).parameters.values()
        offered = inspect.signature(getattr(joint, name)).parameters.values()
        assert [(it.name, it.kind) for it in offered] == [(it.name, it.kind) for it in expected], name
        optional = [it.name for it in offered if it.default is not it.empty]
        assert optional == [it.name for it in expected if it.default is not it.empty], name
