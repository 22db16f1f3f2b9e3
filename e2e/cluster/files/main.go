// Command files serves a folder of models as a model hub does: any path's last part names the file, ranges are answered, and
// bytes flow no faster than told. What was asked is kept for the tests to read.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// request is what a test can learn of one request.
type request struct {
	Method        string `json:"method"`
	Path          string `json:"path"`
	Range         string `json:"range,omitempty"`
	Authorization string `json:"authorization,omitempty"`
	From          string `json:"from"`
	Bytes         int64  `json:"bytes"`
}

// server serves the files under root at rate bytes a second and connection (0: as fast as it goes).
type server struct {
	root     string
	rate     atomic.Int64
	mutex    sync.Mutex
	requests []*request
}

// paced writes no faster than the server's rate, which may change meanwhile.
type paced struct {
	http.ResponseWriter
	server *server
	record *request
}

const piece = 16 << 10

func (p *paced) Write(data []byte) (int, error) {
	written := 0
	for written < len(data) {
		n, err := p.ResponseWriter.Write(data[written:min(len(data), written+piece)])
		written += n
		atomic.AddInt64(&p.record.Bytes, int64(n))
		if err != nil {
			return written, err
		}
		if rate := p.server.rate.Load(); rate > 0 {
			time.Sleep(time.Duration(n) * time.Second / time.Duration(rate))
		}
	}
	return written, nil
}

// ReadFrom hides that of the wrapped writer, which would send without pace.
func (p *paced) ReadFrom(from io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{p}, from)
}

func (s *server) file(w http.ResponseWriter, r *http.Request) {
	from, _, _ := net.SplitHostPort(r.RemoteAddr)
	record := &request{Method: r.Method, Path: r.URL.Path, Range: r.Header.Get("Range"), Authorization: r.Header.Get("Authorization"), From: from}
	s.mutex.Lock()
	s.requests = append(s.requests, record)
	s.mutex.Unlock()
	file, err := os.Open(filepath.Join(s.root, path.Base(path.Clean("/"+r.URL.Path))))
	if err != nil {
		http.NotFound(w, r)
		return
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil || info.IsDir() {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("ETag", fmt.Sprintf("%q", fmt.Sprintf("%x-%x", info.Size(), info.ModTime().UnixNano())))
	w.Header().Set("Content-Type", "application/octet-stream")
	http.ServeContent(&paced{ResponseWriter: w, server: s, record: record}, r, "", info.ModTime(), file)
}

func (s *server) setRate(w http.ResponseWriter, r *http.Request) {
	rate, err := strconv.ParseInt(r.URL.Query().Get("bytes"), 10, 64)
	if err != nil {
		http.Error(w, "bytes must be a whole number", http.StatusBadRequest)
		return
	}
	s.rate.Store(rate)
}

func (s *server) stats(w http.ResponseWriter, _ *http.Request) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	copies := make([]request, 0, len(s.requests))
	for _, r := range s.requests {
		one := *r
		one.Bytes = atomic.LoadInt64(&r.Bytes)
		copies = append(copies, one)
	}
	_ = json.NewEncoder(w).Encode(copies)
}

func main() {
	listen := flag.String("listen", ":8080", "address")
	root := flag.String("root", "/models", "folder")
	rate := flag.Int64("rate", 0, "bytes a second and connection, 0: no limit")
	flag.Parse()
	s := &server{root: *root}
	s.rate.Store(*rate)
	mux := http.NewServeMux()
	mux.HandleFunc("/", s.file)
	mux.HandleFunc("PUT /-/rate", s.setRate)
	mux.HandleFunc("GET /-/requests", s.stats)
	log.Fatal(http.ListenAndServe(*listen, mux))
}
