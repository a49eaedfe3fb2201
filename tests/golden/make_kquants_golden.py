"""Makes kquants.npz: what stock llama.cpp computes of the files of tests/kquants.py, and how well it quantizes.

In: llama.cpp's library, its llama-quantize and the bindings of llama-cpp-python. Out: kquants.npz beside this file.
Next: tests/test_convert_kquants.py, which needs none of them.

    scripts/get_llama_cpp.sh
    python tests/golden/make_kquants_golden.py ~/.cache/hotcold/llama.cpp

Contents: "MIXTURE" float32 [len(POSITIONS), len(columns)], logits of the quantized file; "MIXTURE exact", of the same
weights in F32: how far the two are apart is what rounding activations to 8 bits costs llama.cpp. (One token at a time
it gives the very bits of one batch, so that tells nothing.) "Q4_K NAME": relative error of llama-quantize's Q4_K on a
matrix of `samples`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
WORKER = HERE.parent.parent / "scripts" / "comparison" / "stock_worker.py"
sys.path.insert(0, str(HERE.parent))

import kquants  # noqa: E402
from golden_layout import MAIN_LENGTH, POSITIONS, columns  # noqa: E402
from tiny import token_ids  # noqa: E402

from hotcold.runtime.gguf_file import dequantize, open_gguf  # noqa: E402


def main() -> None:
    llama = Path(sys.argv[1]).expanduser()
    chosen = np.ix_(POSITIONS, columns(kquants.N_VOCAB))
    golden = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for mixture in kquants.MIXTURES:
            for name, in_f32 in ((mixture, False), (f"{mixture} exact", True)):
                golden[name] = logits(llama, kquants.write_stock(path, mixture, in_f32))[chosen]
            error = np.linalg.norm(golden[mixture] - golden[name]) / np.linalg.norm(golden[name])
            print(f"{mixture}: llama.cpp is {error:.4f} from exact")
        golden |= quantizing_errors(llama / "bin" / "llama-quantize", path)
    np.savez_compressed(HERE / "kquants.npz", **golden)


def logits(llama: Path, model: Path) -> np.ndarray:
    """float32 [MAIN_LENGTH, N_VOCAB] by llama.cpp, in one batch."""
    ids, out = model.with_name("ids.npy"), model.with_name("out.npy")
    np.save(ids, np.array(token_ids(MAIN_LENGTH, kquants.N_VOCAB), np.int32))
    command = [sys.executable, WORKER, "logits", model, ids, out, "--lib", llama / "bin", "--bindings", llama]
    subprocess.run(command, check=True, capture_output=True)
    return np.asarray(np.load(out))


def quantizing_errors(program: Path, path: Path) -> dict[str, np.ndarray]:
    """Relative L2 error of Q4_K for every sample."""
    values = kquants.samples()
    kquants.write_stock(path, "Q4_K_M", in_f32=True, values=values)
    out = path.with_name("q4_k.gguf")
    subprocess.run([program, "--pure", path, out, "Q4_K", "1"], check=True, capture_output=True)
    with open_gguf(out) as file:
        got = {name: dequantize(file.data(f"{name}.weight"), kquants.Q.Q4_K) for name in values}
    errors = {f"Q4_K {n}": np.linalg.norm(got[n] - x) / np.linalg.norm(x) for n, x in values.items()}
    print(errors)
    return errors


if __name__ == "__main__":
    main()
