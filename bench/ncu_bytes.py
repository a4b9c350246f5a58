#!/usr/bin/env python3
"""Holds the device bytes that plans predict against the hardware's counters: the kernels of each row of `suanpan bench attn --device cuda
--repeats 0` once under ncu, in order.

usage: ncu_bytes.py SUANPAN [OUT.json] [-- options of the bench]
The options decide the cells: by default 1k to 32k tokens at head dims 64, 128 and 256, full and causal, and decode.
Passes when in every row counted and predicted bytes differ by at most 10 %, and no more is written than q, o and lse make: no score matrix. ncu
empties the caches before each kernel, and what a kernel writes last still lies in the L2 when it ends: of writes that were not counted, as many
bytes as the L2 has count as written for each kernel ("left").
"""
import csv
import io
import json
import subprocess
import sys

READ, WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
L2 = 50e6
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def main():
    arguments = sys.argv[1:]
    options = ["--lengths", "1024,2048,4096,8192,16384,32768", "--head-dims", "64,128,256"]
    if "--" in arguments:
        at = arguments.index("--")
        arguments, options = arguments[:at], arguments[at + 1:]
    bench = [arguments[0], "bench", "attn", "--device", "cuda", "--repeats", "0", "--json", *options]
    rows = json.loads(subprocess.run(bench, check=True, capture_output=True, text=True).stdout)["rows"]
    ncu = ["ncu", "--clock-control", "none", "--csv", "--metrics", f"{READ},{WRITE}", "-k", "regex:^(forward|decode|unpack|rows_|append_)", *bench]
    text = subprocess.run(ncu, check=True, capture_output=True, text=True).stdout
    lines = [line for line in text.splitlines() if line.startswith('"')]
    counted = {}
    for line in csv.DictReader(io.StringIO("\n".join(lines))):
        value = float(line["Metric Value"].replace(",", "")) * UNITS[line["Metric Unit"]]
        counted.setdefault(int(line["ID"]), {"kernel": line["Kernel Name"]})[line["Metric Name"]] = value
    counted = [counted[i] for i in sorted(counted)]
    launches = sum(row["launches"] for row in rows)
    assert len(counted) == launches, f"{len(counted)} kernels counted, {launches} launches"
    out, faults = [], 0
    for row in rows:
        mine, counted = counted[: row["launches"]], counted[row["launches"]:]
        count = {key: sum(c[key] for c in mine) for key in (READ, WRITE)} | {"kernel": ", ".join(c["kernel"] for c in mine)}
        predicted = row["predicted"]
        reads, writes = predicted["device_read_bytes"], predicted["device_write_bytes"]
        left = min(max(writes - count[WRITE], 0), row["launches"] * L2)
        ratio = (count[READ] + count[WRITE] + left) / (reads + writes)
        scores = row["batch"] * row["num_q_heads"] * row["seqlen_q"] * row["seqlen_k"] * 2
        ok = abs(ratio - 1) <= 0.10 and count[WRITE] <= writes * 1.05 + 2e6
        faults += not ok
        print(f"{'ok  ' if ok else 'FAIL'} {row['phase']} d {row['head_dim']} {row['mask']} B {row['batch']} k {row['seqlen_k']} {row['kv_dtype']} {row['kv']}: read "
              f"{count[READ] / 1e6:.1f} MB ({reads / 1e6:.1f} predicted), written {count[WRITE] / 1e6:.1f} and {left / 1e6:.1f} left ({writes / 1e6:.1f}), ratio {ratio:.3f}; "
              f"a score matrix would be {scores / 1e6:.0f} MB; {count['kernel']}", flush=True)
        out.append({k: row[k] for k in ("phase", "head_dim", "mask", "batch", "seqlen_q", "seqlen_k", "kv_dtype", "kv", "kernel", "predicted")}
                   | {"counted_read_bytes": count[READ], "counted_write_bytes": count[WRITE], "left_bytes": left, "ratio": ratio})
    if len(arguments) > 1:
        with open(arguments[1], "w") as f:
            json.dump(out, f, indent=1)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
