"""Configuration of the whole test suite."""

import os

# Eight devices, so that sharded cases mean something; before anything initializes the backend.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
