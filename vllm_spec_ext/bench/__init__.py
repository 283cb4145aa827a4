# SPDX-License-Identifier: Apache-2.0
"""The benchmark: methods side by side against plain decoding (see ``vllm-spec bench --help``)."""
