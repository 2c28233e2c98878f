"""The joint of the Hub: implements the core's `HubAccess`."""

from llamarl.parts.hub.fetch import cached, fetched, listing, model_files, small_files
from llamarl.parts.hub.push import push_model
from llamarl.parts.hub.sources.hub import with_data

__all__ = ["cached", "fetched", "listing", "model_files", "push_model", "small_files", "with_data"]
