#!/usr/bin/env python3
"""Holds the device bytes that plans predict against the hardware's counters: each kernel of `suanpan bench attn --device cuda --repeats 0` once
under ncu, in order.

usage: ncu_bytes.py SUANPAN [OUT.json] [-- options of the bench]
The options decide the cells: by default 1k to 32k tokens at head dims 64, 128 and 256, full and causal, and decode.
Passes when counted and predicted bytes differ by at most 10 % in every row, and no more is written than q, o and lse make: no score matrix.
ncu empties the caches before each kernel; what a kernel writes last may still lie in the L2 when it ends, so fewer bytes written are no fault.
"""
import csv
import io
import json
import subprocess
import sys

READ, WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def main():
    arguments = sys.argv[1:]
    options = ["--lengths", "1024,2048,4096,8192,16384,32768", "--head-dims", "64,128,256"]
    if "--" in arguments:
        at = arguments.index("--")
        arguments, options = arguments[:at], arguments[at + 1:]
    bench = [arguments[0], "bench", "attn", "--device", "cuda", "--repeats", "0", "--json", *options]
    rows = json.loads(subprocess.run(bench, check=True, capture_output=True, text=True).stdout)["rows"]
    ncu = ["ncu", "--clock-control", "none", "--csv", "--metrics", f"{READ},{WRITE}", "-k", "regex:^(forward|decode|unpack|rows_|append)", *bench]
    text = subprocess.run(ncu, check=True, capture_output=True, text=True).stdout
    lines = [line for line in text.splitlines() if line.startswith('"')]
    counted = {}
    for line in csv.DictReader(io.StringIO("\n".join(lines))):
        value = float(line["Metric Value"].replace(",", "")) * UNITS[line["Metric Unit"]]
        counted.setdefault(int(line["ID"]), {"kernel": line["Kernel Name"]})[line["Metric Name"]] = value
    counted = [counted[i] for i in sorted(counted)]
    assert len(counted) == len(rows), f"{len(counted)} kernels counted, {len(rows)} rows"
    out, faults = [], 0
    for row, count in zip(rows, counted):
        predicted = row["predicted"]
        reads, writes = predicted["device_read_bytes"], predicted["device_write_bytes"]
        ratio = (count[READ] + count[WRITE]) / (reads + writes)
        scores = row["batch"] * row["num_q_heads"] * row["seqlen_q"] * row["seqlen_k"] * 2
        ok = abs(ratio - 1) <= 0.10 and count[WRITE] <= writes * 1.05 + 2e6
        faults += not ok
        print(f"{'ok  ' if ok else 'FAIL'} {row['phase']} d {row['head_dim']} {row['mask']} B {row['batch']} k {row['seqlen_k']} {row['kv']}: read "
              f"{count[READ] / 1e6:.1f} MB ({reads / 1e6:.1f} predicted), written {count[WRITE] / 1e6:.1f} ({writes / 1e6:.1f}), ratio {ratio:.3f}; "
              f"a score matrix would be {scores / 1e6:.0f} MB; {count['kernel']}", flush=True)
        out.append({k: row[k] for k in ("phase", "head_dim", "mask", "batch", "seqlen_q", "seqlen_k", "kv", "kernel", "predicted")}
                   | {"counted_read_bytes": count[READ], "counted_write_bytes": count[WRITE], "ratio": ratio})
    if len(arguments) > 1:
        with open(arguments[1], "w") as f:
            json.dump(out, f, indent=1)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
