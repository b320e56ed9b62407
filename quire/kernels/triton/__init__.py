"""The Triton kernels. Imported only where one is about to run: a CPU install has no Triton.

Each module is the GPU half of the module of the same name in `quire/kernels/`, which holds the plain torch twin and
picks between them.
"""

from quire.kernels.triton.cache_folder import secure_cache

secure_cache()
