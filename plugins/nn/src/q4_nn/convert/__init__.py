"""``convert_linears_``: quantise the linear layers of any ``nn.Module``, in place."""
