"""The Triton kernels. Imported only where one is about to run: a CPU install has no Triton.

Each module is the GPU half of the module of the same name in `quire/kernels/`, which has the torch reference and
chooses between the two.
"""

from quire.kernels.triton.cache_folder import secure_cache

secure_cache()
