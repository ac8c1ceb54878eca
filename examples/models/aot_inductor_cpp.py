# SPDX-License-Identifier: Apache-2.0
"""AOTInductor in C++: a package with tile kernels inside, run by a C++ program that knows nothing of Python."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import torch_tile

PROGRAM = r"""
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>

int main(int, char** argv) {
  std::ifstream file(argv[2], std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  torch::Tensor x = torch::jit::pickle_load(bytes).toTensor();
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  torch::Tensor y = model.run({x})[0];
  std::cout.precision(9);
  std::cout << y.to(torch::kDouble).sum().item<double>() << " " << y.to(torch::kDouble).abs().sum().item<double>();
}
"""

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)).eval()
x = torch.randn(4, 64)
folder = Path(tempfile.mkdtemp(prefix="torch_tile_aot_"))
with torch.no_grad():
    exact = model(x).double()
    exported = torch.export.export(model, (x,))
configs = torch_tile.inductor_configs(options={"select": "tile"})
package = torch._inductor.aoti_compile_and_package(
    exported, package_path=str(folder / "model.pt2"), inductor_configs=configs
)
loaded = torch._inductor.aoti_load_package(package)(x)
torch.testing.assert_close(loaded.double(), exact, rtol=1e-4, atol=1e-4)
print(f"package: {Path(package).stat().st_size} bytes; from Python, error {(loaded - exact).abs().max():.1e}")

# The same package from C++. `--cpp` builds and runs the program; torch's headers take a compiler most of a minute.
if "--cpp" in sys.argv:
    from torch.utils.cpp_extension import include_paths, library_paths

    (folder / "main.cpp").write_text(PROGRAM)
    torch.save(x, folder / "x.pt")
    command = ["g++", "-O0", "-std=c++20", str(folder / "main.cpp"), "-o", str(folder / "main")]
    command += [f"-I{path}" for path in include_paths()]
    for path in library_paths():
        command += [f"-L{path}", f"-Wl,-rpath,{path}"]
    subprocess.run([*command, "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"], check=True)
    said = subprocess.run(
        [folder / "main", package, folder / "x.pt"], check=True, capture_output=True, text=True
    ).stdout.split()
    total, size = map(float, said)
    assert abs(size - exact.abs().sum()) < 1e-2 and abs(total - exact.sum()) < 1e-2, said
    print(f"from C++: sum of magnitudes {size:.3f}, in Python {exact.abs().sum():.3f}")
else:
    print("run with --cpp to build and run the C++ program as well")
shutil.rmtree(folder)
