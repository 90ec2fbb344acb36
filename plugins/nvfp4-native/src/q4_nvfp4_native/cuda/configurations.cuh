// Made from configurations.json by `python -m q4_nvfp4_native.configurations`.
// Name, most rows of x, then BM, BN, warps along M, N and K, stages.
Q4_CONFIGURATION(m16, 16, 16, 32, 1, 1, 4, 3)
Q4_CONFIGURATION(m64, 128, 64, 64, 2, 2, 1, 4)
Q4_CONFIGURATION(m128, 2147483647, 128, 128, 2, 4, 1, 4)
