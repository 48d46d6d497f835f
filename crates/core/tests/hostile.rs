//! Checkpoints that lie, are damaged, or are someone else's: each its own typed error, no panic, no
//! allocation by a number from the file.

mod common;

use std::path::{Path, PathBuf};

use common::{dir, file, index, open_err, ramp, valid};
use deepseek_v41_core::{Error, LoadPolicy, StoredDtype, WeightError, Weights};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// The reason a lone file is refused with; asserts that the error names the file.
#[track_caller]
fn refused(bytes: &[u8]) -> String {
    let dir = dir(&[(SINGLE, bytes)]);
    match open_err(dir.path()) {
        Error::Checkpoint { file, reason } => {
            assert_eq!(file, dir.path().join(SINGLE));
            reason
        }
        other => panic!("expected Error::Checkpoint, found {other:?}"),
    }
}

/// The parts of an `Error::Weight`.
#[track_caller]
fn weight(err: Error) -> (String, Option<PathBuf>, WeightError) {
    match err {
        Error::Weight { name, file, reason } => (name, file, reason),
        other => panic!("expected Error::Weight, found {other:?}"),
    }
}

fn two_tensors() -> Vec<u8> {
    valid(&[
        ("a.weight", StoredDtype::BF16, &[2, 3], ramp(12, 1)),
        ("a.scale", StoredDtype::F8_E8M0, &[5], ramp(5, 7)),
    ])
}

#[test]
fn empty_file() {
    assert_eq!(refused(&[]), "the file is empty");
}

#[test]
fn file_shorter_than_its_length_field() {
    assert_eq!(refused(&[16, 0, 0]), "header too small");
}

#[test]
fn truncated_anywhere() {
    let whole = two_tensors();
    for cut in 1..whole.len() {
        refused(&whole[..cut]);
    }
}

#[test]
fn truncated_data_says_so() {
    let whole = two_tensors();
    assert!(refused(&whole[..whole.len() - 1]).contains("not fully covered"));
}

#[test]
fn bytes_after_the_last_tensor() {
    let mut bytes = two_tensors();
    bytes.push(0);
    assert!(refused(&bytes).contains("not fully covered"));
}

#[test]
fn header_length_past_the_end() {
    let mut bytes = two_tensors();
    bytes[..8].copy_from_slice(&4096u64.to_le_bytes());
    assert_eq!(refused(&bytes), "invalid header length");
}

#[test]
fn header_length_shorter_than_the_header() {
    let mut bytes = two_tensors();
    bytes[..8].copy_from_slice(&20u64.to_le_bytes());
    assert!(refused(&bytes).contains("invalid JSON"));
}

#[test]
fn header_length_beyond_any_sense() {
    for n in [100_000_001, u64::MAX / 2, u64::MAX - 7, u64::MAX] {
        let mut bytes = two_tensors();
        bytes[..8].copy_from_slice(&n.to_le_bytes());
        assert_eq!(refused(&bytes), "header too large", "{n}");
    }
}

#[test]
fn header_is_not_json() {
    assert!(refused(&file("<html>404</html>", &[])).contains("invalid JSON"));
    assert!(refused(&file("[1, 2, 3]", &[])).contains("invalid JSON"));
    assert!(refused(&file(&"[".repeat(50_000), &[])).contains("invalid JSON"));
}

#[test]
fn header_is_not_utf8() {
    let mut bytes = file("{\"a\":0}", &[]);
    bytes[10] = 0xff;
    assert!(refused(&bytes).contains("UTF-8"));
}

#[test]
fn overlapping_offsets_name_the_tensor() {
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
    assert!(refused(&file(header, &ramp(6, 0))).contains("`b`"));
}

#[test]
fn a_hole_between_tensors_names_the_tensor() {
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[6,10]}}"#;
    assert!(refused(&file(header, &ramp(10, 0))).contains("`b`"));
}

#[test]
fn offsets_backwards() {
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#;
    assert!(refused(&file(header, &ramp(4, 0))).contains("`a`"));
}

#[test]
fn negative_or_fractional_offsets_and_dims() {
    for (shape, offsets) in [
        ("[-1]", "[0,4]"),
        ("[4]", "[-4,0]"),
        ("[4.5]", "[0,4]"),
        ("[1e30]", "[0,4]"),
    ] {
        let header =
            format!(r#"{{"a":{{"dtype":"U8","shape":{shape},"data_offsets":{offsets}}}}}"#);
        assert!(
            refused(&file(&header, &ramp(4, 0))).contains("invalid JSON"),
            "{shape} {offsets}"
        );
    }
}

#[test]
fn shape_that_is_not_the_data_names_the_tensor() {
    for (dtype, shape) in [
        ("F32", "[4]"),
        ("BF16", "[3]"),
        ("U8", "[2,2,2]"),
        ("F4", "[9]"),
    ] {
        let header = format!(
            r#"{{"ok":{{"dtype":"U8","shape":[3],"data_offsets":[0,3]}},"liar":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[3,8]}}}}"#
        );
        let reason = refused(&file(&header, &ramp(8, 0)));
        assert!(reason.contains("`liar`"), "{dtype} {shape}: {reason}");
    }
}

#[test]
fn dims_whose_product_overflows_name_the_tensor() {
    let huge = 1u64 << 32;
    for shape in [
        format!("[{huge},{huge}]"),
        format!("[{},2]", u64::MAX),
        format!("[{}]", u64::MAX),
    ] {
        let header =
            format!(r#"{{"huge":{{"dtype":"F32","shape":{shape},"data_offsets":[0,4]}}}}"#);
        let reason = refused(&file(&header, &ramp(4, 0)));
        assert!(reason.contains("`huge`"), "{shape}: {reason}");
    }
}

#[test]
fn unknown_dtype() {
    let header = r#"{"a":{"dtype":"F3","shape":[4],"data_offsets":[0,4]}}"#;
    assert!(refused(&file(header, &ramp(4, 0))).contains("F3"));
}

#[test]
fn empty_directory_and_missing_directory() {
    let empty = dir(&[]);
    assert!(
        matches!(open_err(empty.path()), Error::Checkpoint { file, .. } if file == empty.path())
    );
    let absent = empty.path().join("absent");
    assert!(matches!(open_err(&absent), Error::Io { path, .. } if path == absent));
}

#[test]
fn index_is_not_an_index() {
    for text in [
        "",
        "{",
        "[]",
        "{}",
        r#"{"weight_map":["a"]}"#,
        r#"{"weight_map":{"a":1}}"#,
    ] {
        let dir = dir(&[(INDEX, text.as_bytes()), (SINGLE, &two_tensors())]);
        let err = open_err(dir.path());
        assert!(
            matches!(&err, Error::Checkpoint { file, reason }
                if *file == dir.path().join(INDEX) && reason.contains("not a safetensors index")),
            "{text}: {err:?}"
        );
    }
}

#[test]
fn index_names_a_shard_that_is_not_there() {
    let dir = dir(&[(
        INDEX,
        &index(&[("a.weight", "model-00001-of-00001.safetensors")]),
    )]);
    let path = dir.path().join("model-00001-of-00001.safetensors");
    assert!(matches!(open_err(dir.path()), Error::Io { path: p, .. } if p == path));
}

#[test]
fn index_reaches_outside_of_its_directory() {
    let outer = dir(&[("secret.safetensors", &two_tensors())]);
    let inner = outer.path().join("model");
    std::fs::create_dir(&inner).expect("writable");
    let absolute = outer
        .path()
        .join("secret.safetensors")
        .display()
        .to_string();
    for shard in [
        "../secret.safetensors",
        "./../secret.safetensors",
        "x/y.safetensors",
        "..",
        "",
        &absolute,
    ] {
        std::fs::write(inner.join(INDEX), index(&[("a.weight", shard)])).expect("writable");
        let err = open_err(&inner);
        assert!(
            matches!(&err, Error::Checkpoint { file, reason }
                if *file == inner.join(INDEX) && reason.contains("a.weight") && reason.contains("plain file name")),
            "{shard}: {err:?}"
        );
    }
}

#[test]
fn index_names_a_tensor_its_shard_lacks() {
    let map = index(&[("a.weight", "s"), ("a.scale", "s"), ("a.bias", "s")]);
    let dir = dir(&[(INDEX, &map), ("s", &two_tensors())]);
    let found = weight(open_err(dir.path()));
    assert_eq!(
        found,
        (
            "a.bias".into(),
            Some(dir.path().join("s")),
            WeightError::Missing
        )
    );
}

#[test]
fn index_puts_a_tensor_into_the_wrong_shard() {
    let other = valid(&[("b", StoredDtype::U8, &[2], ramp(2, 0))]);
    let map = index(&[("a.weight", "s"), ("a.scale", "t"), ("b", "t")]);
    let dir = dir(&[(INDEX, &map), ("s", &two_tensors()), ("t", &other)]);
    let found = weight(open_err(dir.path()));
    assert_eq!(
        found,
        (
            "a.scale".into(),
            Some(dir.path().join("s")),
            WeightError::Unexpected
        )
    );
}

#[test]
fn shard_holds_a_tensor_its_index_does_not_name() {
    let dir = dir(&[(INDEX, &index(&[("a.weight", "s")])), ("s", &two_tensors())]);
    let found = weight(open_err(dir.path()));
    assert_eq!(
        found,
        (
            "a.scale".into(),
            Some(dir.path().join("s")),
            WeightError::Unexpected
        )
    );
}

#[test]
fn one_name_in_two_shards_names_both() {
    let again = valid(&[("a.scale", StoredDtype::U8, &[1], ramp(1, 0))]);
    let dir = dir(&[("1.safetensors", &two_tensors()), ("2.safetensors", &again)]);
    let (name, file, reason) = weight(open_err(dir.path()));
    assert_eq!(
        (name.as_str(), file),
        ("a.scale", Some(dir.path().join("2.safetensors")))
    );
    assert!(
        matches!(&reason, WeightError::Content(why) if why.contains("1.safetensors")),
        "{reason}"
    );
}

#[test]
fn missing_extra_misshaped_and_mistyped_tensors_are_four_errors() {
    let dir = dir(&[(SINGLE, &two_tensors())]);
    let path = Some(dir.path().join(SINGLE));
    for policy in [LoadPolicy::Mmap, LoadPolicy::Read] {
        let weights = Weights::open(dir.path(), policy).expect("valid");
        let vb = weights.var_builder(&candle_core::Device::Cpu).pp("a");

        let missing = vb
            .raw("bias", &[StoredDtype::BF16], &[2])
            .expect_err("not there");
        assert_eq!(
            weight(missing),
            ("a.bias".into(), None, WeightError::Missing)
        );

        let shape = vb
            .raw("weight", &[StoredDtype::BF16], &[3, 2])
            .expect_err("transposed");
        let reason = WeightError::Shape {
            expected: vec![3, 2],
            found: vec![2, 3],
        };
        assert_eq!(weight(shape), ("a.weight".into(), path.clone(), reason));

        let dtype = vb
            .raw("weight", &[StoredDtype::F8_E4M3], &[2, 3])
            .expect_err("bf16");
        let reason = WeightError::Dtype {
            expected: vec![StoredDtype::F8_E4M3],
            found: StoredDtype::BF16,
        };
        assert_eq!(weight(dtype), ("a.weight".into(), path.clone(), reason));

        let unused: Vec<&str> = weights.unused().iter().map(|t| t.name.as_str()).collect();
        assert_eq!(unused, ["a.scale"], "the tensor nobody asked for");
        let (name, file, reason) = weight(weights.unused()[0].error(WeightError::Unexpected));
        assert_eq!(
            (name.as_str(), file, reason),
            ("a.scale", path.clone(), WeightError::Unexpected)
        );
    }
}

#[test]
fn messages_name_tensor_and_file() {
    let dir = dir(&[(SINGLE, &two_tensors())]);
    let weights = Weights::open(dir.path(), LoadPolicy::Read).expect("valid");
    let vb = weights.var_builder(&candle_core::Device::Cpu);
    let text = vb
        .tensor_f32("a.scale", &[5])
        .expect_err("a scale is not a number")
        .to_string();
    assert!(
        text.contains("`a.scale`") && text.contains(SINGLE) && text.contains("F8_E8M0"),
        "{text}"
    );
}

#[test]
fn shards_in_memory_get_the_same_checks() {
    let bytes = bytes::Bytes::from(two_tensors());
    let short = bytes.slice(..bytes.len() - 1);
    let err = Weights::from_shards(vec![("half".into(), short)]).expect_err("truncated");
    assert!(matches!(err, Error::Checkpoint { file, .. } if file == Path::new("half")));
    let err = Weights::from_shards(vec![("x".into(), bytes.clone()), ("y".into(), bytes)])
        .expect_err("every name twice");
    let (_, file, reason) = weight(err);
    assert_eq!(file.as_deref(), Some(Path::new("y")));
    assert!(matches!(reason, WeightError::Content(why) if why.contains('x')));
}
