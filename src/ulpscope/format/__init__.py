# SPDX-License-Identifier: Apache-2.0
"""Define the bytes on disk: the only code that knows the layout of frames, MessagePack, content keys, hashes, checksums and fingerprints.

docs/store-format.md specifies them. `capture/native/_compiled.pyx` writes the same frames, and `numerics/_kernel.c` takes the same
fingerprints and content hashes; tests hold them against this folder.
"""
