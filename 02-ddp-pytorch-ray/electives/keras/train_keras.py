"""Train a Keras model with Ray Train on N workers, and prove that N equal one.

    python train_keras.py --num-workers 2 --epochs 3

It runs in an environment of its own, which README.md of the electives says how to make.
Ray's TensorflowTrainer sets TF_CONFIG, with which TensorFlow's workers find
each other, and TF_USE_LEGACY_KERAS=1: `tf.keras` is Keras 2 then, from the package
tf-keras, as MultiWorkerMirroredStrategy does not train models of Keras 3.
"""

import argparse
import os
import shlex
import sys
import tempfile
from pathlib import Path

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # no banners
# Ray sets it in each worker, too, but after tensorflow was imported there.
os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # no second Ray, by mistake

import ray
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer

DIGITS = Path(__file__).resolve().parents[3] / "utils" / "data" / "digits.npz"
GLOBAL_BATCH, TRAINING = 64, 1408  # images per step of all workers, and of training


def load_data() -> tuple[tuple, tuple]:
    """Return images (N x 64, between 0 and 1) and labels, to train and to test with."""
    with np.load(DIGITS) as digits:
        images = digits["images"].reshape(-1, 64).astype("float64") / 16
        labels = digits["labels"].astype("int64")
    return (images[:TRAINING], labels[:TRAINING]), (
        images[TRAINING:],
        labels[TRAINING:],
    )


def build():
    """Return a compiled model, with the same weights on every worker."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(0)
    layers = [tf.keras.layers.Dense(64, "relu", input_shape=(64,))]
    layers += [tf.keras.layers.Dense(10)]
    model = tf.keras.Sequential(layers)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    return model


def train_fn(config: dict) -> dict:
    """Train on this worker, in step with the others; report a checkpoint per epoch."""
    import tensorflow as tf

    tf.keras.backend.set_floatx("float64")  # N workers add in another order than one
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = build()
    (images, labels), test = load_data()
    data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(GLOBAL_BATCH)
    # Each worker takes its share of every global batch; with OFF, each takes every image.
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    shares = strategy.experimental_distribute_dataset(data.with_options(options))

    class Report(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            """Save on all workers, as it may be a collective; report what rank 0 saved."""
            metrics = {"epoch": epoch, "loss": float(logs["loss"])}
            with tempfile.TemporaryDirectory() as folder:
                self.model.save_weights(f"{folder}/model.weights.h5")
                first = ray.train.get_context().get_world_rank() == 0
                saved = Checkpoint.from_directory(folder) if first else None
                ray.train.report(metrics, checkpoint=saved)

    epochs = config["epochs"]
    model.fit(
        data.with_options(options), epochs=epochs, verbose=0, callbacks=[Report()]
    )
    logits = model(test[0]).numpy()
    return {
        "weights": model.get_weights(),
        "accuracy": float((logits.argmax(1) == test[1]).mean()),
        "images per epoch": sum(
            len(part)
            for _, labels in shares
            for part in strategy.experimental_local_results(labels)
        ),
        "keras": tf.keras.Model.__module__.partition(".")[0],
    }


def fit(num_workers: int, epochs: int, storage: str) -> dict:
    """Train on `num_workers` workers, and return what rank 0 returned."""
    trainer = TensorflowTrainer(
        train_fn,
        train_loop_config={"epochs": epochs},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(storage_path=storage, name=f"keras-{num_workers}"),
    )
    return trainer.fit().return_value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    # Ray does not quote the path of its workers' Python, which may have a space
    quoted = {"py_executable": shlex.quote(sys.executable)}
    cpus = args.num_workers + 1
    ray.init("local", num_cpus=cpus, log_to_driver=False, runtime_env=quoted)
    with tempfile.TemporaryDirectory() as storage:
        many = fit(args.num_workers, args.epochs, storage)
        one = fit(1, args.epochs, storage)
    ray.shutdown()
    assert one["images per epoch"] == TRAINING
    assert many["images per epoch"] == TRAINING // args.num_workers
    pairs = zip(many["weights"], one["weights"], strict=True)
    worst = max(float(np.abs(ours - alone).max()) for ours, alone in pairs)
    print(f"{many['keras']}: {many['accuracy']:.1%} of the test images are right")
    print(f"max |weights of {args.num_workers} workers - weights of one| = {worst:.0e}")
    if worst > 1e-10:
        raise SystemExit("They differ: the workers did not share each global batch.")
    print(f"Proved: {args.num_workers} workers end with the weights of one")


if __name__ == "__main__":
    main()
