//! scratch
use suanpan_ops::*;
use std::time::Instant;
fn main() {
    let path = std::env::args().nth(1).unwrap();
    let file = std::fs::File::open(path).unwrap();
    let map = unsafe { memmap2::Mmap::map(&file).unwrap() };
    let (rows, cols) = (262144usize, 640usize);
    let bytes = rows * cols / 32 * 34;
    let at = map.len() - bytes - 4096;
    let data = &map[at..at + bytes];
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    pool.install(|| {
        for p in [Precision::Int16, Precision::Int8] {
            let w = Weight::new(WeightFormat::Q8_0, rows, cols, data).unwrap();
            let mut input = LinearInput::quantised_only(1, cols, p);
            let x: Vec<f32> = (0..cols).map(|i| (i as f32 * 0.37).sin()).collect();
            input.set(&x, 1, cols);
            let mut ws = LinearWorkspace::new(1, 2);
            let mut out = vec![0f32; rows];
            let mut t = vec![];
            for _ in 0..15 {
                let s = Instant::now();
                linear(&mut [(w, LinearOut { data: &mut out, row_stride: rows, add: false })], &input, &mut ws);
                t.push(s.elapsed().as_secs_f64() * 1e3);
            }
            t.sort_by(f64::total_cmp);
            println!("{p:?}: {:.2} .. median {:.2} ms", t[0], t[7]);
            // a part that stays in cache: 32768 rows is 22 MB, too many; 1024 rows 0.7 MB in two second-level caches
            let n = 1024;
            let w = Weight::new(WeightFormat::Q8_0, n, cols, &data[..n * cols / 32 * 34]).unwrap();
            let s = Instant::now();
            for _ in 0..256 { linear(&mut [(w, LinearOut { data: &mut out, row_stride: n, add: false })], &input, &mut ws); }
            println!("   cached, same work: {:.2} ms", s.elapsed().as_secs_f64() * 1e3);
        }
        let s = Instant::now();
        let half = data.len() / 2;
        let sum = |d: &[u8]| d.iter().step_by(64).fold(0u8, |a, &b| a.wrapping_add(b));
        let r = rayon::join(|| sum(&data[..half]), || sum(&data[half..]));
        println!("plain read {:.2} ms {r:?}", s.elapsed().as_secs_f64() * 1e3);
    });
}
