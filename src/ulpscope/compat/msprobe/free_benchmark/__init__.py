# SPDX-License-Identifier: Apache-2.0
"""Run the task free_benchmark: each chosen call once more with disturbed inputs."""
