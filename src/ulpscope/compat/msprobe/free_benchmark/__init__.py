# SPDX-License-Identifier: Apache-2.0
"""The task free_benchmark: each chosen call once more with disturbed inputs."""
