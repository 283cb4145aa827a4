# SPDX-License-Identifier: Apache-2.0
"""The command line ``vllm-spec``; each command is a module, loaded when it is called."""
