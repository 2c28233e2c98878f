"""The controller: one asyncio process that orders all executors. It never touches a tensor."""
