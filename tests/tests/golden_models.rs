//! Whole models against recorded runs of the official code: prefill, every decode step, drafts.

// Helpers of tests may panic like the tests themselves.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use candle_core::Device;
use deepseek_v41_examples::golden_model::{Distance, GoldenModel, Mode};
use deepseek_v41_testing::golden_dir;

fn run(name: &str, mode: Mode, replay: bool) -> Distance {
    let dir = golden_dir().join(format!("model_{name}"));
    let model = GoldenModel::load(Path::new(&dir), mode, &Device::Cpu).unwrap();
    model.run(&model.text_rows().unwrap(), replay).unwrap()
}

fn worst(distance: &Distance) -> f64 {
    distance.logits.iter().copied().fold(0.0, f64::max)
}

/// Limits: twice the largest distance between two equally valid runs of the official code (f32 and
/// f64 sums), as the golden data's manifest records it.
#[test]
fn models_in_which_nothing_flips_stay_within_twice_the_noise() {
    for (name, limit) in [("bf16", 0.025), ("fp8x", 0.005)] {
        let distance = run(name, Mode::Reference, false);
        assert!(worst(&distance) <= limit, "{name}: {:?}", distance.logits);
        let (equal, all) = distance.routes;
        assert_eq!(equal, all, "{name}: expert selections");
    }
}

#[test]
fn an_fp8_model_is_followed_to_the_last_bit_of_its_prefill() {
    let distance = run("fp8x", Mode::Reference, false);
    for (name, value) in distance.prefill {
        assert!(value < 1e-6, "{name}: {value}");
    }
}

#[test]
fn replayed_selections_keep_the_full_models_within_twice_the_noise() {
    for (name, limit) in [("full", 2.0 * 0.05824), ("text", 2.0 * 0.08467)] {
        for mode in Mode::ALL {
            let distance = run(name, mode, true);
            assert!(
                worst(&distance) <= limit,
                "{name} {mode:?}: {:?}",
                distance.logits
            );
            // The selections before replay must be those of the keys that were scored.
            let (own, all) = distance.decode_selections;
            let (other, _) = distance.other_selections;
            println!("{name} {mode:?}: {own} of {all} selections equal, {other} the other mode's");
            assert!(
                own as f64 >= 1.7 * other as f64,
                "{name} {mode:?}: {own} and {other} of {all}"
            );
        }
    }
}

#[test]
fn drafted_blocks_follow_the_official_head() {
    // Twice the noise of positions with an equal prefix: 0.01157, and 0.06735 where experts flip. The
    // noise of fp8x, 0.0022, is that of two runs in which hardly a code flipped; a flipped one costs
    // its block 0.02 to 0.03, and the limit admits it in about one block of ten.
    for (name, replay, limit) in [
        ("bf16", false, 0.0232),
        ("fp8x", false, 0.01),
        ("full", true, 0.1347),
    ] {
        let drafts = run(name, Mode::Reference, replay).drafts;
        assert!(drafts.logits <= limit, "{name}: {drafts:?}");
        let (equal, all) = drafts.tokens;
        assert!(equal as f64 >= 0.8 * all as f64, "{name}: {drafts:?}");
    }
}

/// The tower is 0.7 % off its own golden values, where 2 % are allowed: sums in another order. Moving
/// this model's picture rows at random by as much moves its layers by as much as they are off here, and
/// its logits by 0.08, which is the golden data's own limit for `dense`.
#[test]
fn sequences_with_pictures_stay_within_the_noise_of_the_tower() {
    for (name, replay, limit) in [("dense", false, 0.08), ("full", true, 2.0 * 0.05824)] {
        for mode in Mode::ALL {
            let dir = golden_dir().join(format!("model_{name}"));
            let model = GoldenModel::load(Path::new(&dir), mode, &Device::Cpu).unwrap();
            assert!(!model.image_rows().unwrap().is_empty(), "{name}");
            let rows: Vec<usize> = (0..model.sequences().unwrap()).collect();
            let distance = model.run(&rows, replay).unwrap();
            println!("{name} {mode:?}: {:.4}", worst(&distance));
            assert!(
                worst(&distance) <= limit,
                "{name} {mode:?}: {:?}",
                distance.logits
            );
            // Pictures reach the gate: its bias for them decides which experts these tokens get.
            let (equal, all) = distance.routes;
            assert!(
                equal as f64 >= 0.95 * all as f64,
                "{name} {mode:?}: {equal} of {all} routes"
            );
        }
    }
}
