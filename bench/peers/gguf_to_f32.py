#!/usr/bin/env python3
"""Writes a GGUF file again with every weight as F32: the same numbers, so that two programs can be compared without what either rounds.

llama.cpp multiplies a quantised weight with activations rounded to 8 bits, a float weight with floats: on this file only its sums and its cache
round. Everything but the tensor types is copied. Usage: gguf_to_f32.py MODEL.gguf OUT.gguf        (pip install gguf)
"""
import sys

import gguf
import numpy as np


def main():
    source, out = sys.argv[1:]
    reader = gguf.GGUFReader(source)
    arch = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(out, arch)
    for field in reader.fields.values():
        # The writer sets the architecture and the counts itself.
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        kind, *elem = field.types
        value = int(gguf.LlamaFileType.ALL_F32) if field.name == "general.file_type" else field.contents()
        writer.add_key_value(field.name, value, kind, sub_type=elem[-1] if elem else None)
    for t in reader.tensors:
        shape = [int(n) for n in reversed(t.shape)]
        writer.add_tensor(t.name, gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
