# SPDX-License-Identifier: Apache-2.0
"""The door of api_accuracy_checker (2023): what it dumped, how it was switched, and the checks over it."""
