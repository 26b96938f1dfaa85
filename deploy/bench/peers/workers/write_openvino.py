"""Exports a checkpoint for OpenVINO: python -m workers.write_openvino CHECKPOINT FOLDER.

`FOLDER/exported` keeps the dtype of the weights, `FOLDER/int4` has all matrices in 4 bits,
symmetric and in groups. Tokenizers go with them: a pipeline with a draft model compares
these.
"""

import argparse
import shutil
from pathlib import Path


def main() -> None:
    import nncf
    import openvino
    from optimum.exporters.openvino import main_export

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--group-size", type=int, default=128, help="weights that share a scale")
    arguments = parser.parse_args()
    exported, packed = arguments.folder / "exported", arguments.folder / "int4"
    main_export(
        str(arguments.checkpoint),
        exported,
        task="text-generation-with-past",
        convert_tokenizer=True,
    )
    shutil.copytree(exported, packed, ignore=shutil.ignore_patterns("openvino_model.*"))
    model = openvino.Core().read_model(exported / "openvino_model.xml")
    model = nncf.compress_weights(
        model,
        mode=nncf.CompressWeightsMode.INT4_SYM,
        group_size=arguments.group_size,
        all_layers=True,
    )
    openvino.save_model(model, packed / "openvino_model.xml", compress_to_fp16=False)


if __name__ == "__main__":
    main()
