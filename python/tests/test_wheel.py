"""The wheel: packed from the build, installed into a fresh environment beside torch, and imported.

In: the build whose programs are in CADRE_PROGRAMS. Nothing is fetched but maturin, once, into the cache.
"""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = """
import cadre, pathlib, sysconfig, torch
assert cadre.__file__.startswith(sysconfig.get_path("purelib")), cadre.__file__
q, ends = torch.randn(5, 2, 8), torch.tensor([0, 2, 5])
o = cadre.flash_attn_varlen_func(q, q, q, ends, ends, 3, 3, causal=True)
assert torch.allclose(o[[0, 2]], q[[0, 2]])
for it in ("torch-cpu", "torch-cuda"):
    files = {one.name for one in pathlib.Path(cadre.__path__[0], "kernel/build", it).iterdir() if one.is_file()}
    assert files == {"__init__.py", "metadata.json"}, files
"""


class Wheel(unittest.TestCase):
    def test_it_is_small_and_computes_in_a_fresh_environment(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)

            def run(*command: str | Path) -> str:
                more = {"text": True, "check": False, "cwd": folder, "capture_output": True}
                ended = subprocess.run(command, **more)
                self.assertEqual(ended.returncode, 0, ended.stderr)
                return ended.stdout.strip()

            wheel = Path(run(ROOT / "scripts" / "wheel", folder))
            self.assertLess(wheel.stat().st_size, 8_000_000)
            self.assertRegex(wheel.name, r"^cadre-[0-9.]+-cp310-abi3-manylinux_2_[0-9]+_x86_64\.whl$")
            run(sys.executable, "-m", "venv", folder / "fresh")
            # Torch is that of this environment.
            fresh = folder / "fresh" / "bin" / "python"
            (Path(run(fresh, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")) / "torch.pth").write_text(
                "\n".join(it for it in sys.path if it.endswith("site-packages"))
            )
            run(fresh, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel)
            run(fresh, "-I", "-c", SCRIPT)


if __name__ == "__main__":
    unittest.main()
