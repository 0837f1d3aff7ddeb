"""The models that the tests serve (SGLANG_EXTERNAL_MODEL_PACKAGE): SGLang imports all of its own otherwise, which takes
a minute, and many need kernels of a GPU."""
